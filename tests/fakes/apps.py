"""Applications for `serve deploy` around the fake engine."""

from ray.serve import Application

from deploy.app import AppArgs, build_application


def build(args: AppArgs) -> Application:
    """The product's application with the host tier's folder for the fake's state."""
    return build_application(
        args, app_name=args.app_name, engine_builder="tests.fakes.fake_engine:build_for_server"
    )
