"""The published tables and figures of ZeRO and its successors, computed by this library, beside what was printed.

    tables.TABLES[name]() -> Table            names: zero-table1, infinity-fig2a, ...; `zeroshard papers` shows them

`data/` holds what was printed; each file says of which paper and table it is, and whether it was printed or read off a chart.
"""
