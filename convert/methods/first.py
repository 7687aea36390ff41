"""`first`: every group shares its first member's K and V head, bit for bit (an ablation of the GQA paper, arXiv 2305.13245)."""

from convert.methods.grouped import GroupedMethod, pooling
from convert.methods.text import TextUse

METHOD = GroupedMethod(
    "first", "first head of each group", "arXiv:2305.13245", TextUse.IGNORED, pooling(lambda members: members[0])
)
