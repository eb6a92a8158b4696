"""The engine: requests, the scheduler, the step, verification, and the thread that drives it."""
