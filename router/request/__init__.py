"""One request's data, which its execution owns: its valid form, its output stream, and its stored record.

Entry: ``valid_request.ValidRequest`` and ``token_stream.TokenStream``. Tokens enter by ``output.Output``, one for each
output, and leave to the stream's one reader, which holds a ``ReaderLease``; ``stored`` makes records of requests and
streams, and both of records.
"""
