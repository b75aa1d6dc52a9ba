"""Native code of the router: compiled and loaded by `engine.native.build`, and done without where that fails."""
