"""The meaning of each operator in plain PyTorch, written to be read. Runs on every device."""

from csrc_free_ops.reference.checkpoints import scatter_checkpoints
from csrc_free_ops.reference.decode import decode, decode_batch_invariant, visible_keys
from csrc_free_ops.reference.gdn import (
    gdn_chunk_prefill,
    gdn_chunk_prefill_pool,
    gdn_recurrence,
)
from csrc_free_ops.reference.gdn_decode import gdn_decode, gdn_gates
from csrc_free_ops.reference.tensor_scatter import heads_dimension, tensor_scatter

__all__ = [
    "decode",
    "decode_batch_invariant",
    "gdn_chunk_prefill",
    "gdn_chunk_prefill_pool",
    "gdn_decode",
    "gdn_gates",
    "gdn_recurrence",
    "heads_dimension",
    "scatter_checkpoints",
    "tensor_scatter",
    "visible_keys",
]
