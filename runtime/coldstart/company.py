"""What a chunk of a cold request shares its step with, as the planner sees it. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from ...profiles.models import MachineModel
from ..scheduler.cold import StepRows
from .cold import ColdPart, Company


class CompanyModel:
    """Says how long other rows of a step take."""

    def __init__(self, model: MachineModel, decode_step_s: Callable[[int], float]) -> None:
        """``decode_step_s``: one forward of so many rows that decode, without adapters."""
        self._model = model
        self._decode_step_s = decode_step_s

    def of_step(self, rows: StepRows, cold: Sequence[ColdPart]) -> Company:
        """All rows that ``rows`` has so far; ``cold``: those of its cold chunks."""
        company = self.of_decodes(rows)
        prefill_s = self._model.lora.prefill_s
        return replace(
            company,
            num_tokens=company.num_tokens + sum(number for _, number in rows.chunks),
            warm_s=company.warm_s
            + sum(prefill_s(number, request.adapter_bytes) for request, number in rows.chunks),
            cold=tuple(cold),
        )

    def of_decodes(self, rows: StepRows) -> Company:
        """The rows that decode alone: who will be there in later steps, too."""
        num_rows = len(rows.decodes)
        if not num_rows:
            return Company()
        lora_s = self._model.lora.decode_s([request.adapter_bytes for request in rows.decodes])
        forward_s = self._decode_step_s(num_rows)
        if rows.is_decode_apart:
            return Company(apart_s=forward_s + lora_s)
        # Rows that look at keys of their own cost more than so many tokens of one row.
        attention_s = max(0.0, forward_s - self._model.step_s.at(num_rows))
        return Company(num_tokens=num_rows, warm_s=lora_s + attention_s)
