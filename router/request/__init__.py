"""One request's data, which its execution owns: its valid form, its output stream, and its stored record.

Entry: ``valid_request.ValidRequest`` and ``token_stream.TokenStream``. Tokens enter by the stream's one ``TokenWriter``
and leave to its one reader, which holds a ``ReaderLease``; ``stored`` makes records of both, and both of records.
"""
