"""A logind that sleeps when a line of a pipe says so: what `lock-on-suspend` is tested against."""

import os
import sys
import threading

import dbus
import dbus.mainloop.glib
import dbus.service
from gi.repository import GLib

INTERFACE = "org.freedesktop.login1.Manager"
# More than the 5 of logind's InhibitDelayMaxSec=: a daemon that is late on a busy machine is no fault.
DELAY_SECONDS = 60


class Manager(dbus.service.Object):
    count = 0
    pipes = []

    @dbus.service.method(INTERFACE, in_signature="ssss", out_signature="h")
    def Inhibit(self, what, who, why, mode):
        ours, theirs = os.pipe()
        self.pipes.append(ours)
        self.count += 1
        print("inhibited", what, mode, who, self.count)
        descriptor = dbus.types.UnixFd(theirs)
        os.close(theirs)
        return descriptor

    @dbus.service.signal(INTERFACE, signature="b")
    def PrepareForSleep(self, start):
        pass

    def sleep(self):
        self.PrepareForSleep(True)
        GLib.timeout_add(1000 * DELAY_SECONDS, self.give_up, len(self.pipes))
        self.waiting = len(self.pipes)
        for pipe in self.pipes:
            GLib.io_add_watch(pipe, GLib.IO_HUP, self.released)
        self.pipes = []

    def released(self, pipe, _):
        os.close(pipe)
        self.waiting -= 1
        if self.waiting == 0:
            print("asleep")
        return False

    def give_up(self, _):
        if self.waiting > 0:
            print("gave up waiting for", self.waiting)
        return False


def orders(manager, pipe):
    with open(pipe) as lines:
        for line in lines:
            if line.strip() == "sleep":
                GLib.idle_add(manager.sleep)
            else:
                GLib.idle_add(manager.PrepareForSleep, False)


dbus.mainloop.glib.DBusGMainLoop(set_as_default=True)
bus = dbus.SystemBus()
name = dbus.service.BusName("org.freedesktop.login1", bus)
manager = Manager(bus, "/org/freedesktop/login1")
threading.Thread(target=orders, args=(manager, sys.argv[1]), daemon=True).start()
print("ready")
GLib.MainLoop().run()
