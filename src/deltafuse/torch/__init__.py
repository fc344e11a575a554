"""The export-time route, for those who own the model's code: the gated delta rule leaves as one node from the start.

``deltafuse.torch`` needs the extra ``torch``. Its two functions take the place of transformers'
``torch_chunk_gated_delta_rule`` and ``torch_recurrent_gated_delta_rule``: the same arguments, the same results, and
under an exporter of torch the nodes that ``fuse`` would have written for the chosen target.

    >>> import torch, deltafuse.torch
    >>> with deltafuse.torch.use_custom_gated_delta_rule(model, target="ascend-310p"):
    ...     torch.onnx.export(model, args, "prefill.onnx", dynamo=False)

Outside of that block a TorchScript export of a model that calls the functions itself is for ``ascend-310p``, and one by
way of torch.export for whom `translations` says. What cannot be exported for a target raises `deltafuse.UserError`,
with the limit's reason.
"""

from __future__ import annotations

try:
    import torch as _torch
except ImportError as error:
    raise ImportError("deltafuse.torch needs torch: pip install 'deltafuse[torch]'") from error

from deltafuse.torch.patching import use_custom_gated_delta_rule
from deltafuse.torch.rule import chunk_gated_delta_rule, recurrent_gated_delta_rule
from deltafuse.torch.translation import translations

__all__ = ["chunk_gated_delta_rule", "recurrent_gated_delta_rule", "translations", "use_custom_gated_delta_rule"]

del _torch
