"""Model folders and hub repositories: a path goes in, a checked ``checkpoint.Checkpoint`` and its weights come out.

``weight_files``, ``weight_shapes`` and ``model_types`` check files without torch. Nothing here owns memory of a device.
"""
