"""Which profile goes with a model."""

from pathlib import Path

from planner import ServingProfile

NO_PROFILE = "none"  # of the setting `planner.profile`
PROFILE_FILE = "cachesmith-profile.json"  # in a model's folder
SHIPPED = Path(__file__).parent / "profiles"


def find_profile(name_or_dir: str) -> Path | None:
    """The profile in the model's folder, or the shipped one of this name.

    name_or_dir: as in the settings, before any folder is found for a name
    """
    own = Path(name_or_dir).expanduser() / PROFILE_FILE
    if own.is_file():
        return own
    is_name = name_or_dir == Path(name_or_dir).name and not Path(name_or_dir).exists()
    shipped = SHIPPED / f"{name_or_dir}.json"
    return shipped if is_name and shipped.is_file() else None


def describe(profile: ServingProfile | None) -> str:
    """What planning goes by, in words for whoever starts the server."""
    if profile is None:
        return (
            "no profile of this model: costs are measured at start, and how much requests need is "
            "assumed (`cachesmith profile` measures both)"
        )
    costs = "costs" if profile.costs is not None else "no costs"
    if profile.demand is None:
        note = f" ({profile.demand_note})" if profile.demand_note else ""
        return f"the profile of {profile.model} has {costs} and no demand{note}: that is assumed"
    return f"the profile of {profile.model} has {costs}, and the demand of {profile.demand.task}"
