"""Parts of `cachesmith bench control-plane`: an engine of no time, a bare application, loads."""
