"""A made-up machine on which everything costs something."""

from planner import CostModel


def every_price(num_layers: int) -> CostModel:
    return CostModel(
        num_layers=num_layers,
        fixed_ms=40.0,
        request_ms=5.0,
        layer_ms=1.0,
        member_ms=0.3,
        filter_ms=4.0,
        row_ms=0.02,
        compare_ms=0.004,
        pair_ms=1e-5,
        selected_pair_ms=1.5e-5,
        reuse_ms=0.002,
    )
