"""What Serve says of an application that starts, in a line, and why it failed."""

from ray.serve.schema import ApplicationStatusOverview

_ERROR_LINES = 40


def progress_of(overview: ApplicationStatusOverview) -> str:
    parts = []
    for name, deployment in overview.deployments.items():
        states = {str(getattr(k, "value", k)): n for k, n in deployment.replica_states.items()}
        running = states.get("RUNNING", 0)
        parts.append(f"{name} {running} of {sum(states.values())} running")
        if not running:
            failed = "rror" in deployment.message  # else the message only says that it takes time
            last_line = deployment.message.strip().splitlines()[-1:] if failed else []
            parts[-1] += f" ({(last_line or ['loading'])[0][:200]})"
    return ", ".join(parts) or "waiting for Serve"


def failure_of(overview: ApplicationStatusOverview) -> str:
    """The replicas' own errors: the end of each failed deployment's message."""
    messages = [
        f"{name}: {deployment.message.strip()}"
        for name, deployment in overview.deployments.items()
        if deployment.message and deployment.status.value != "HEALTHY"
    ]
    text = "\n".join(messages) or overview.message
    lines = text.splitlines()
    return "\n".join(lines[-_ERROR_LINES:])
