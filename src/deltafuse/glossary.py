"""The words that tables, pages and JSON documents have as headings and labels, for ``fuse explain``. Light."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache

__all__ = ["GLOSSARY", "term_of"]

# The names of a term, the first of which it goes by, and below them what it means.
_WRITTEN = """\
site; sites
    a place in the graph that is, or looks like, a rule; named by the exporter's scopes, layers.0, else site.0; --site
    NAME shows one in detail
rule; pattern; recurrence; recurrences
    what a site computes; fuse patterns lists what is looked for, and a site's detail has the rule in the model's own
    names
status; status note; outcome; unchanged; unreadable
    what becomes of a site or model: match, fused, refused, near-miss or left out; a model in a folder may also be
    copied or unchanged (it was never fused), unreadable (its bytes are no model), or failed (it could not be done)
match; matches
    a site that is proven to be the rule and could be fused; nothing was written of it
fused; fused pair
    a site with the target's operator in its place, or the file or files that have it
unfused
    the model as it was exported, before fuse
refused
    a site that is the rule, while a limit of the target or of the graph forbids to fuse it; its code stands in
    brackets, and fuse explain CODE tells more
near-miss; neighbour; neighbours
    a site that resembles the rule and is not: often a neighbour, a known way to get the rule wrong, whose code stands
    in brackets; it stays as it is
left out; left
    a site that matches, and that --sites, --skip-sites, --form or a plan leaves out
nearest; compared with; difference; differences; why not; smallest relative difference; smallest relative differences;
what was looked at; looked; from 1e-16 to 1, by powers of ten
    of a near miss: its inputs and outputs, and the smallest relative difference between its result and that of the
    rule and of each neighbour; one at 1e-12 or below fits
reason; code; text; why it is left; fix; failed; what it is
    why a site, output or run is not as it should be: a code, what it means, and as fix what to do
form
    how the exporter wrote a rule: chunk, recurrent, loop, scan, function, or expression
chunk
    a rule written over chunks of tokens at once, as for a prompt: with inverses and masks inside
recurrent
    a rule written token by token, as for decode
loop; scan
    a rule whose tokens are steps of an ONNX Loop or Scan
function
    a rule that lies in a model-local function of the file
expression; parameters
    an ordinary expression without a recurrence, a norm or convolution, say, and the numbers that were solved for it
operator; op; operators; operators before and after; ops; target node; count; change
    the node that stands in a site's place, or how often each operator is in the graph before and after; what sites
    became comes first
nodes; node; nodes before; nodes after; nodes removed; nodes added; added; node count; emitted; before; after; graph;
before (dashed) over after (filled)
    how many nodes there are and come in their place: of a site those from its operands to its results and those that
    read sizes for them; what is there for them alone goes with them, and what others read stays
dims; B; T; H; D
    sizes of a site: B batch (sequences), T tokens, H key heads/value heads, D key head size x value head size; a name
    is a dynamic axis
scale; factor
    what the output of the rule is multiplied by, often 1/sqrt(head size)
l2 norm; norms; qk l2norm; l2norm eps
    whether query and key are divided by their length, and the epsilon inside the root
tokens; valid tokens; validity; proven; tried; below; above
    the numbers of tokens for which the unfused graph is the rule, or with which was compared; an exporter writes
    sizes of its example into a graph, so that it fails or is wrong with others, while the fused node has no such
    limit unless a note says so
error; max error; emitted error
    the largest relative difference between graph and rule in double, over all draws; a proof stands at 1e-12 or
    below, since the two round differently
proof; precision; equal to the rule; what is written
    how equality was shown: the site and the rule are run on draws, in float64, and so are the nodes that are written
draw; draws; seed
    one set of made-up operands, mild or extreme, on which two graphs are run and compared
shared with; shared
    a site whose graph is equal up to names, so that one proof is that of both
roles; role; operand; operands; results; query; key; value; g; beta; state; out; final state
    what a tensor is to the rule: query, key and value, g the logarithm of the decay, beta how strongly a token
    writes, the state from before and after, and out, the result
layout; layouts; BTHD; BT(HD); BHKV
    the axes of a tensor in order: B batch, T tokens, H heads, D head size, K of keys, V of values; (HD) is one axis
    of both
pinned; pins; was; now; pinned axes; pinned tensor; axis; size; why
    an axis that the fused file declares with a fixed size where it had a name: the target takes so many sequences
    (static-batch), the unfused graph is right for so many tokens only (valid_tokens), or --pin asked for it; --no-pin
    leaves axes as they are
rounding; rounded; cast; casts; instead; rounding nrmse; bf16 boundary; float16 boundary; boundary; exact
    what is lost where a kernel takes another type than the model has, float16 for float32, say: at the boundary
    operands are cast there and results back; exact is the same without the casts
dead nodes
    nodes whose results nothing needs any more once a site is fused; they go with it
inside; body
    the body of an If, Loop or Scan that a site lies in
note; notes
    what to know of a site or file although it is right; each begins with a code
target; targets
    what the file is fused for: its operators, types and limits; fuse targets lists them
layers; linear attention; full attention
    which layers of the model are linear attention (a rule of this kind), and which full attention (a softmax over all
    tokens), as far as it is seen
extracted
    files that --extract wrote of each site: before, after, and after with plain operators
held; replaced; fused before; fused before this run
    what is known of a site that an earlier run fused: the node, its ports and attributes, and from the rollback
    record what it replaced
record; records; rollback; restored; still fused; remaining; mode
    what the fused file, or one beside it, keeps of the original, so that fuse rollback gives it back byte for byte
model; models; file; files; written; output; outputs; inputs; inputs and outputs; kind; extent
    the files that were read and written, and the tensors that a model takes and gives
tensor; tensors; name; type; types; dtype; dtypes; shape; shapes; sizes; bytes; attribute; port; domain
    a value of the graph, its element type and sizes; a size with a name is dynamic, and ? is not known; a port is
    what the operator calls it
written by; producer; producer op; readers; consumers; gives; to; from; through; index; sources
    which node writes a tensor, how many read it, and where casts lead from and to
external data; location; offset; copied; weights; values
    initializers, and those of them whose numbers lie in files beside the model
opset; opsets; ir version
    versions of the operator sets and of the format that the file says it is written in
seconds; peak; total
    how long each stage took, and the largest memory of a run in bytes
exit; schema
    the exit code of the command, see its --help, and the version of the JSON document
sha256
    a digest of a file's bytes, by which it is known again
verdict; equal; differs; passes; beyond; within the bar; skipped
    what a comparison came to: equal and passes are within the bars, differs is beyond one, and the rest says why
    nothing was compared
bar; bars; tolerance
    how close is close enough; it follows from types, weights and the target, and --nrmse, --cosine and --max-abs set
    others
nrmse; first nrmse; last; most; rms
    normalised root mean square error: root mean square of the difference over that of the values; 0 is equal, 1e-3 is
    usual where float16 rounds
cosine
    the cosine of the angle between two outputs taken as vectors; 1 is the same direction
max abs; rounding max abs; accumulated max abs
    the largest absolute difference of two outputs; of a site, that of its result whose nrmse is worst
isolated; isolated nrmse; sites alone, in double
    the error of one site alone, fed the unfused model's own values, so that the difference is its own
accumulated; accumulated nrmse; error per site; site in the model
    the error of the same tensor in the run of the whole fused model, with all that came before it
worst; worst tensor; worst: unfused, fused
    where the difference is largest: the tensor, or the place in it with both numbers
network; whole models
    both models run whole on the same inputs, output by output
task; token by token; rollout; steps; equal tokens; first that differs; first difference; step; prefilled
    what prefill and decode say one token after the other, and the first at which the two pairs part
drift; drift of the recurrent states per step
    how the error of logits and states grows from step to step
loss; nll; loss per token
    the mean negative log likelihood of a text, token by token, by each pair
top1; most likely token; margin; agree; lost; rows; logits; fused margin; unfused margin
    in how many rows the most likely token is the same, and by how much it leads the next
masks; reach; right-padded; left-padded; the mask reaches it; output of the unfused model; depends; padding; right;
silent
    prompts that are padded on one side are compared too, and which outputs the attention mask changes at all
structure; findings; finding; found; wanted; part
    what was read off the graph around the fused nodes and is not as the target needs it: what was found, and what was
    wanted
bisect; bisected; culprits; untried; runs
    sites that move an output beyond the bar, found by fusing half of them at a time
ablations; decision; decision undone; ablation
    the error of a site with one decision of fuse undone: a type, the scale, the head map
divergence; blame; first
    the first tensor beyond the bar, and whether the site itself or what came before it is to blame
reproduction; command
    small files that show the fault of one site, and the command that does
lowered
    a fused node as plain operators, which any runtime runs; fuse lower writes them
prefill; decode
    the graph that takes a whole prompt, and the one that takes token after token and hands on the states
mapping; fitted
    which output of one run becomes which input of the next, and what was cut or filled up so that it fits
"""


def _read(written: str) -> Iterator[tuple[tuple[str, ...], str]]:
    for names, text in re.findall(r"((?:\S.*\n)+)((?: .*\n)+)", written):
        yield tuple(name.strip() for name in names.replace("\n", " ").split(";")), " ".join(text.split())


#: Names of a term, the first of which it goes by -> what it means.
GLOSSARY: Mapping[tuple[str, ...], str] = dict(_read(_WRITTEN))


def term_of(word: str) -> tuple[str, str] | None:
    """The name of a term and what it means; None where it is none.

    Args:
        word: as it is written anywhere: ``near miss``, ``near-miss`` and ``near_miss`` are one.
    """
    return _names().get(_plain(word))


@cache
def _names() -> Mapping[str, tuple[str, str]]:
    return {_plain(name): (names[0], text) for names, text in GLOSSARY.items() for name in names}


def _plain(word: str) -> str:
    return re.sub(r"[\s_-]+", " ", word.strip()).casefold()
