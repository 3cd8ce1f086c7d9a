"""Fixtures of the deployment's tests."""

from deploy.local_ray import prepare_environment

prepare_environment()  # here: no test module has imported Ray yet
