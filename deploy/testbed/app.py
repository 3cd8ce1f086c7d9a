"""The Serve application of the testbed where its engine is emulated."""

from ray.serve import Application

from deploy.app import APP_NAME, AppArgs, build_application
from deploy.testbed.emulated_engine import RankedEngine
from replicas.config import EngineConfig

EMULATED_APP = "deploy.testbed.app:build"
_ENGINE_BUILDER = "deploy.testbed.app:build_engine"


def build(args: AppArgs) -> Application:
    """As deploy.app:build, with the emulated engine."""
    return build_application(args, app_name=APP_NAME, engine_builder=_ENGINE_BUILDER)


def build_engine(config: EngineConfig) -> RankedEngine:
    return RankedEngine(config)
