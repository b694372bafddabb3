"""The public service: validate, admit, place, dispatch, follow."""
