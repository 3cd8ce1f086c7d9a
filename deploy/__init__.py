"""Settings, composition and the command line: what makes a running system of the packages."""
