"""Rows of the table of scales [chunks, HV, SCALE_ROWS, C], fp32: what multiplies token i of a chunk.

x and y are the inverse norms of k and q (1 without normalisation), G the running sum of g within the chunk.
"""

READ = 0  # e^G x: keys that read the state before the chunk
DECAY = 1  # e^(G_last), for every token
KEY_NORM = 2  # x
WRITE = 3  # e^(G_last - G) x: keys that write the state after it
BETA = 4
GATE = 5  # G
QUERY_NORM = 6  # y
SCALE_ROWS = 7
