"""inject.py PID: makes the first thread of a process do system calls, as a led-astray program would. Reads lines `NAME NUMBER ARGUMENT...`
from standard input; an argument is a number or `s:TEXT`, of which the address is passed. Prints `NAME RESULT`, where the result is `ok` or the
name of an error. On x86-64 alone.

Nothing is written into the program: the thread waits in a system call, so the instruction before its next one is `syscall`, which is run again with
other registers, in a single step. Strings lie below its stack."""
import ctypes
import errno
import os
import struct
import sys

ATTACH, DETACH, STEP, GETREGS, SETREGS, CONT = 16, 17, 9, 12, 13, 7
NAMES = "r15 r14 r13 r12 rbp rbx r11 r10 r9 r8 rax rcx rdx rsi rdi orig_rax rip cs eflags rsp ss fs_base gs_base ds es fs gs".split()
WALL = 0x40000000

libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
libc.ptrace.restype = ctypes.c_long


def ptrace(request, data=None):
    if libc.ptrace(request, pid, None, data) == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"ptrace {request}: {os.strerror(code)}")


def registers():
    buffer = ctypes.create_string_buffer(8 * len(NAMES))
    ptrace(GETREGS, ctypes.addressof(buffer))
    return dict(zip(NAMES, struct.unpack(f"{len(NAMES)}Q", buffer.raw)))


def set_registers(values):
    buffer = ctypes.create_string_buffer(struct.pack(f"{len(NAMES)}Q", *(values[name] & (1 << 64) - 1 for name in NAMES)))
    ptrace(SETREGS, ctypes.addressof(buffer))


def wait_for_trap():
    while True:
        _, status = os.waitpid(pid, WALL)
        assert os.WIFSTOPPED(status), f"the process ended: {status:#x}"
        if os.WSTOPSIG(status) == 5:
            return
        ptrace(STEP)


pid = int(sys.argv[1])
ptrace(ATTACH)
os.waitpid(pid, WALL)
saved = registers()
memory = os.open(f"/proc/{pid}/mem", os.O_RDWR)
assert os.pread(memory, 2, saved["rip"] - 2) == b"\x0f\x05", "the thread does not wait in a system call"
for line in sys.stdin:
    if not line.strip() or line.startswith("#"):
        continue
    name, number, *words = line.split()
    text, arguments = (saved["rsp"] - 4096) & ~15, []
    for word in words:
        if word.startswith("s:"):
            content = word[2:].encode() + b"\0"
            os.pwrite(memory, content, text)
            arguments.append(text)
            text += (len(content) + 15) & ~15
        else:
            arguments.append(int(word, 0))
    arguments += [0] * (6 - len(arguments))
    call = dict(saved, rax=int(number, 0), orig_rax=-1, rip=saved["rip"] - 2)
    call.update(zip(("rdi", "rsi", "rdx", "r10", "r8", "r9"), arguments))
    set_registers(call)
    ptrace(STEP)
    wait_for_trap()
    result = struct.unpack("q", struct.pack("Q", registers()["rax"]))[0]
    print(name, errno.errorcode.get(-result, result) if result < 0 else "ok", flush=True)
set_registers(saved)
ptrace(DETACH)
