"""The engine on one GPU beside limits measured in the same run: ``python -m bench.gpu``.

shapes ──> device ──┬──> ceilings: bandwidth, product rate
                    └──> rows: decodes, prompts, mixes ──> report: table, JSON
"""
