"""Ray reads its environment when it is imported: here, no test module has done so yet."""

from deploy.local_ray import prepare_environment

prepare_environment()
