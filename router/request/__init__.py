"""One request's data: its valid form, its output stream with one writer and one reader, and its stored record."""
