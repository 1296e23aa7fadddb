"""Writes a tar archive of ENTRIES files of BYTES each to standard output, a thousand in each directory: dN/fNUMBER."""

import random
import sys

entries, length = int(sys.argv[1]), int(sys.argv[2])
out, dice = sys.stdout.buffer, random.Random(1)


def member(name, kind, mode, size):
    header = bytearray(512)
    header[0 : len(name)] = name
    header[100:108], header[108:116], header[116:124] = b"%07o\0" % mode, b"0000000\0", b"0000000\0"
    header[124:136], header[136:148], header[148:156] = b"%011o\0" % size, b"%011o\0" % 1700000000, b" " * 8
    header[156:157], header[257:265] = kind, b"ustar\00000"
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


for number in range(entries):
    if number % 1000 == 0:
        out.write(member(b"d%d/" % (number // 1000), b"5", 0o755, 0))
    out.write(member(b"d%d/f%d" % (number // 1000, number), b"0", 0o644, length))
    out.write(dice.randbytes(length) + bytes(-length % 512))
out.write(bytes(1024))
