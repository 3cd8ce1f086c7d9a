"""What breaks when: a YAML file with a list of faults."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from deploy.settings import readable_errors
from deploy.testbed.errors import TestbedError

HEAD = 1
PLANS = Path(__file__).with_name("plans")
DEFAULT_PLAN = PLANS / "default.yaml"


class FaultKind(StrEnum):
    KILL_REPLICA = "kill_replica"  # kill -9 of the process that Serve started
    KILL_RANK = "kill_rank"  # of one tensor-parallel rank
    KILL_SCHEDULER = "kill_scheduler"
    KILL_INGRESS = "kill_ingress"
    CRASH_HOST = "crash_host"  # all its processes are gone at once
    BOOT_HOST = "boot_host"
    CUT_HOST = "cut_host"  # the cable is out: nobody is told
    REJOIN_HOST = "rejoin_host"
    STOP_REDIS = "stop_redis"  # the one of the KV tier, with all it held
    START_REDIS = "start_redis"
    RESTART_HEAD = "restart_head"  # all of Ray there is killed, then started again


_NEEDS_HOST = {
    FaultKind.CRASH_HOST,
    FaultKind.BOOT_HOST,
    FaultKind.CUT_HOST,
    FaultKind.REJOIN_HOST,
}
_TAKES_HOST = _NEEDS_HOST | {
    FaultKind.KILL_REPLICA,
    FaultKind.KILL_RANK,
    FaultKind.KILL_INGRESS,
}
# what mends → what it mends
REPAIRS = {
    FaultKind.BOOT_HOST: FaultKind.CRASH_HOST,
    FaultKind.REJOIN_HOST: FaultKind.CUT_HOST,
    FaultKind.START_REDIS: FaultKind.STOP_REDIS,
}


class Fault(BaseModel):
    """host: 1 is the head; unset where it is optional: the last host that has what is killed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    at_s: float = Field(ge=0)  # since the load began, at the earliest
    kind: FaultKind
    host: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _host_fits_kind(self) -> "Fault":
        if self.kind in _NEEDS_HOST and self.host is None:
            raise ValueError(f"host: {self.kind} needs one")
        if self.kind not in _TAKES_HOST and self.host is not None:
            raise ValueError(f"host: {self.kind} takes none")
        if self.kind in _NEEDS_HOST and self.host == HEAD:
            raise ValueError(f"host: {HEAD} is the head, for which there is restart_head")
        return self


class FaultPlan(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Annotated[int, Field(ge=1, le=1)] = 1
    # a fault waits until what came before it is mended; it and those after it are that much later
    waits: bool = True
    faults: tuple[Fault, ...] = ()

    @model_validator(mode="after")
    def _can_be_carried_out(self) -> "FaultPlan":
        broken: set[tuple[FaultKind, int | None]] = set()
        last_s = 0.0
        for index, fault in enumerate(self.faults):
            if fault.at_s < last_s:
                raise ValueError(f"faults.{index}.at_s: {fault.at_s} is before the one above it")
            last_s = fault.at_s
            if mends := REPAIRS.get(fault.kind):
                if (mends, fault.host) not in broken:
                    raise ValueError(f"faults.{index}.kind: there is no {mends} to mend before it")
                broken.remove((mends, fault.host))
            elif fault.kind in REPAIRS.values():
                broken.add((fault.kind, fault.host))
        if broken:
            kinds = ", ".join(sorted(str(kind) for kind, _ in broken))
            raise ValueError(f"faults: nothing mends {kinds}")
        return self

    def check_hosts(self, num_hosts: int) -> None:
        """Raises TestbedError for a host that there is not."""
        for index, fault in enumerate(self.faults):
            if fault.host is not None and fault.host > num_hosts:
                raise TestbedError(
                    f"faults.{index}.host: there are {num_hosts} hosts, got {fault.host}"
                )

    @property
    def end_s(self) -> float:
        """When the last fault comes, if none has to wait."""
        return self.faults[-1].at_s if self.faults else 0.0


def load_plan(path: Path) -> FaultPlan:
    """Raises TestbedError, with a line for each wrong key."""
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as exc:
        raise TestbedError(f"can not read {path}: {exc.strerror}") from None
    except yaml.YAMLError as exc:
        raise TestbedError(f"{path} is not valid YAML: {exc}") from None
    try:
        return FaultPlan.model_validate({} if content is None else content)
    except ValidationError as exc:
        raise TestbedError(f"{path} can not be used:\n{readable_errors(exc)}") from None
