"""The Ray shells: HTTP ingress, scheduler actor, ticket router, replica deployment.

Only `deployments`, `ingress`, `ray_ports`, `replica`, `router` and `scheduler_actor` import Ray.
"""
