"""Shell completion: the script of each shell and where it goes. What is offered is in `deltafuse.completion`.

Each script runs ``fuse`` with the words in the environment variable ``COMP_WORDS``, one a line, the number of the word
that is completed in ``COMP_CWORD``, and `COMPLETE` set. Fuse answers with one candidate a line; a line ``:files`` says
that a path may stand there.
"""

from __future__ import annotations

import os
from pathlib import Path

from deltafuse.errors import UserError

#: Environment variable that asks for candidates.
COMPLETE = "_FUSE_COMPLETE"

_BASH = r"""
_fuse_completion() {
    local current="${COMP_WORDS[COMP_CWORD]}" line
    COMPREPLY=()
    [[ "$current" == "=" ]] && current=""
    while IFS= read -r line; do
        if [[ "$line" == ":files" ]]; then
            compopt -o filenames 2>/dev/null
            while IFS= read -r line; do COMPREPLY+=("$line"); done < <(compgen -f -- "$current")
        else
            COMPREPLY+=("$line")
        fi
    done < <(COMP_WORDS="$(printf '%s\n' "${COMP_WORDS[@]}")" COMP_CWORD="$COMP_CWORD" _FUSE_COMPLETE=1 "$1")
}
complete -F _fuse_completion fuse
"""

_ZSH = r"""
#compdef fuse
_fuse() {
    local -a found
    local line files=""
    for line in "${(@f)$(COMP_WORDS="${(F)words}" COMP_CWORD=$((CURRENT-1)) _FUSE_COMPLETE=1 "${words[1]}")}"; do
        if [[ "$line" == ":files" ]]; then files=1; elif [[ -n "$line" ]]; then found+=("$line"); fi
    done
    (( $#found )) && compadd -- "${found[@]}"
    [[ -n "$files" ]] && _files
}
compdef _fuse fuse
"""

_FISH = r"""
function __fuse_complete
    set -l words (commandline -opc) (commandline -ct)
    set -l number (math (count $words) - 1)
    for line in (env COMP_WORDS=(string join \n -- $words) COMP_CWORD=$number _FUSE_COMPLETE=1 $words[1])
        if test "$line" = ":files"
            __fish_complete_path (commandline -ct)
        else
            echo $line
        end
    end
end
complete -c fuse -f -a "(__fuse_complete)"
"""

_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
SHELLS = tuple(_SCRIPTS)


def script(shell: str | None = None) -> str:
    """The script of a shell, that of the one that runs where None.

    Raises:
        UserError: ``shell``.
    """
    return _SCRIPTS[_known(shell)].lstrip("\n")


def install(shell: str | None = None, home: Path | None = None) -> tuple[Path, ...]:
    """Writes the script and has the shell read it; twice does no more than once.

    Args:
        shell: that of the one that runs where None.
        home: the user's folder.

    Returns:
        The files that were written or changed.

    Raises:
        UserError: ``shell``.
    """
    shell, home = _known(shell), home or Path.home()
    if shell == "fish":
        return (_write(home / ".config/fish/completions/fuse.fish", script(shell)),)
    if shell == "bash":
        path, startup = home / ".bash_completions/fuse.sh", home / ".bashrc"
        line = f"source '{path}'"
    else:
        path, startup = home / ".zfunc/_fuse", home / ".zshrc"
        line = f"autoload -Uz compinit && compinit && source '{path}'"
    _write(path, script(shell))
    text = startup.read_text() if startup.exists() else ""
    if line not in text.splitlines():
        startup.write_text(f"{text}{'' if not text or text.endswith(chr(10)) else chr(10)}{line}\n")
    return path, startup


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def _known(shell: str | None) -> str:
    name = shell or Path(os.environ.get("SHELL", "")).name
    if name in _SCRIPTS:
        return name
    what = f"there is no completion for the shell {name!r}" if name else "SHELL does not say which shell runs"
    raise UserError("shell", f"{what}; give one of {', '.join(SHELLS)}, e.g. --show-completion bash")
