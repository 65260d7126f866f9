"""A batch spelled out: one segment for each sequence, those that decode included."""

from mlxinfer.engine.batch import Batch, Segment


def segments_of(batch: Batch) -> list[Segment]:
    """Every sequence of a step, in flat order."""
    return [_decode(batch, row) for row in range(len(batch.decodes.sequences))] + batch.ragged


def _decode(batch: Batch, row: int) -> Segment:
    decodes = batch.decodes
    return Segment(
        decodes.sequences[row],
        start=int(decodes.segments.starts[row]),
        num_tokens=1,
        sealed=int(decodes.segments.sealed[row]),
        slot=decodes.slots[row],
        tables=decodes.segments.tables[row],
        num_samples=1,
        output_index=int(decodes.output_index[row]),
        row=row,
    )
