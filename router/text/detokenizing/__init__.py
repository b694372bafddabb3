"""Incremental detokenizing: whole characters, as soon as later tokens can't change them.

    decoder                         a token is             what is held back
    ByteLevel                       some bytes             an incomplete character
    with ByteFallback               text, or one byte      a run of bytes: one bad byte spoils all of a run
    Metaspace, WordPiece, Replace,  text; the first may    nothing
      Strip, none                     lack its space
    BPEDecoder                      text and a space       the space: the last token has none

All pieces together are what ``Tokenizer.decode`` returns; after a prompt, its text and they are what that returns for
all tokens. But an added token with accents is its text, whose letters the library's ByteLevel takes for bytes.
An emoji that may continue (a joiner, a skin tone, half a flag) is held back until the next character.

Not `tokenizers.decoders.DecodeStream`: it loses what it holds back at the end, and it divides emoji.
"""
