"""Bundled tasks: one module each, with one task in it, so that the module's name is the task's."""
