"""A profile of a model that does not exist."""

from planner import CostModel, CostProfile, PhaseFit, ServingProfile, built_in_demand

COST = CostModel(
    num_layers=12,
    fixed_ms=5.0,
    layer_ms=0.2,
    row_ms=0.005,
    pair_ms=1e-7,
    selected_pair_ms=2e-7,
    reuse_ms=5e-5,
)


def profile(**changes: object) -> ServingProfile:
    fit = PhaseFit(phase="patch", num_samples=3, median_error=0.1, worst_error=0.2)
    costs = CostProfile(
        device="a processor",
        num_threads=2,
        tensor_parallel_size=1,
        dtype="float32",
        cost=COST,
        host_bytes_per_ms=1e6,
        fits=(fit,),
    )
    values = {
        "model": "some-model",
        "fingerprint": "f" * 64,
        "num_layers": 12,
        "kv_token_bytes": 1000.0,
        "costs": costs,
        "demand": built_in_demand(12).model_copy(update={"task": "pr"}),
    }
    return ServingProfile(**{**values, **changes})
