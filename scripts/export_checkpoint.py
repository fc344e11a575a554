"""Language models of checkpoints, or tiny ones with random weights, ready to be exported."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from qwen_models import Sizes, build

# That kernels of other packages are missing is of no interest: an export is of the plain code.
logging.set_verbosity_error()

DTYPES = {"fp16": torch.float16, "fp32": torch.float32}


class CheckpointError(Exception):
    """A checkpoint that cannot be used as it is; the message says why."""


@dataclass(frozen=True)
class Checkpoint:
    """A language model.

    Attributes:
        model: a causal language model of transformers; a vision tower is left out.
        module: transformers' file that the model's class comes from.
        image_token: the id that stands for a row of ``image_embeds``, None for a model of text alone.
    """

    model: nn.Module
    module: ModuleType
    image_token: int | None

    @property
    def weight(self) -> torch.Tensor:
        """The embedding, [vocab, hidden], in the dtype of the model."""
        return self.model.get_input_embeddings().weight

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(parameter.nbytes for parameter in self.model.parameters())


def make_tiny(dtype: str) -> Checkpoint:
    """A Qwen3.5 text model with random weights: three linear layers and one with full attention."""
    model = build(Sizes())
    # Not `model.to`: what the rotary embedding keeps stays float32, as in a model that was loaded.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DTYPES[dtype])
    return Checkpoint(model, sys.modules[type(model).__module__], image_token=None)


def load_checkpoint(folder: Path, dtype: str) -> Checkpoint:
    """The language model of a checkpoint's folder.

    Raises:
        CheckpointError: its config or weights cannot be read, or weights are missing.
    """
    logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        model, loading = AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,
            dtype=DTYPES[dtype],
            attn_implementation="eager",
            # The other ways of running experts loop over those that were hit: a trace would keep only these.
            experts_implementation="batched_mm",
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: transformers cannot load it: {error}") from error
    # transformers makes up what is missing, at random.
    missing = sorted(loading["missing_keys"])
    if missing:
        raise CheckpointError(f"{folder}: {len(missing)} weights are missing, {missing[0]} first")
    model.eval().requires_grad_(requires_grad=False)
    image_token = config.image_token_id if hasattr(config, "vision_config") else None
    return Checkpoint(model, sys.modules[type(model).__module__], image_token)
