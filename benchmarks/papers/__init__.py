"""The published tables and figures of ZeRO and its successors, computed by this library, beside what was printed.

    zero.table1() -> Table            command.TABLES has them all, by the names by which `zeroshard papers` shows them

`data/` holds the published values; each file names its paper and table, and says whether they were printed or read off a chart.
"""
