"""A GGUF file as a model folder: `folder.gguf_folder` makes one with the small files of a model, which every other part
reads as it reads those of a published checkpoint. The weights stay in the GGUF file."""
