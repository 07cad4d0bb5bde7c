"""The kernel that counts wrong words; imported only where Triton is to be used."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["expected"])  # type: ignore[untyped-decorator, unused-ignore]
def count_kernel(
    values: tl.tensor,
    expected: tl.tensor,
    errors: tl.tensor,
    num_words: tl.tensor,
    block: tl.constexpr,
    is_address: tl.constexpr,
    is_volatile: tl.constexpr,
) -> None:
    """Add to ``errors`` how many of the int32 ``values`` differ from ``expected``."""
    offsets = tl.program_id(0) * block + tl.arange(0, block)
    is_inside = offsets < num_words
    if is_address:
        # Small addresses come as int32.
        pointers = values.to(tl.int64).to(tl.pointer_type(tl.int32)) + offsets
    else:
        pointers = values + offsets
    seen = tl.load(pointers, mask=is_inside, volatile=is_volatile)
    num_wrong = tl.sum(((seen != expected) & is_inside).to(tl.int32), 0)
    if num_wrong > 0:
        tl.atomic_add(errors, num_wrong)
