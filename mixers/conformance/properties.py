"""What every mixer must do, whatever it computes: the one table of properties."""

from __future__ import annotations

from mixers.conformance import decode, forward, numbers
from mixers.conformance.subject import Property

PROPERTIES = (
    Property("shape", forward.shape_and_dtype, 0),
    Property("lengths", forward.lengths),
    Property("batch rows", forward.batch_rows),
    Property("strides", forward.strides),
    Property("meta", forward.meta, 0),
    Property("causality of gradients", forward.causality_of_gradients, 0),
    Property("causality of values", forward.causality_of_values, 1e-12),
    Property("cuts of extend", decode.cuts_of_extend),
    Property("recomputation", decode.recomputation),
    Property("decode after padding", decode.decode_after_padding),
    Property("fork", decode.fork),
    Property("packing", forward.packed_documents),
    Property("padding", forward.pads),
    Property("gradients", numbers.gradients, 1e-6),
    Property("parameters", numbers.parameters, 0),
    Property("dropout", numbers.dropout, 0),
    Property("determinism", numbers.determinism, 0),
    Property("state rows", decode.state_rows),
    Property("state moves", decode.state_moves, 1e-4),
    Property("state bytes", decode.state_bytes, 0),
    Property("low precision", numbers.low_precision, 0.05),
    Property("state_dict", numbers.state_dict, 0),
    Property("compile", numbers.compiled),
    Property("bidirectional", forward.bidirectional, 0),
    Property("permutation", forward.permutation),
    Property("flops", numbers.flops, 0),
    Property("growth", numbers.growth, 0.1),
    Property("options", numbers.options, 0),
    Property("definition", numbers.definition),
)
