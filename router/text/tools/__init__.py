"""Calls of tools in an output's text: one file per format that chat templates declare.

`formats` finds the format of a template, `call_parser` divides text into calls and the rest; `call_options` says what
a request wants of that.
"""
