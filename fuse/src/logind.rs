//! logind client: announces sleeps of the machine, and delays them briefly.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use crate::dbus::{self, Bus, BusMessage, BusMethod};

/// Address of the system bus, unless `DBUS_SYSTEM_BUS_ADDRESS` is set.
const SYSTEM_BUS: &str = "unix:path=/run/dbus/system_bus_socket;unix:path=/var/run/dbus/system_bus_socket";
const SERVICE: &str = "org.freedesktop.login1";
const PATH: &str = "/org/freedesktop/login1";
const INTERFACE: &str = "org.freedesktop.login1.Manager";
const SIGNAL: &str = "PrepareForSleep";

/// Connection that is subscribed to logind's sleep signal.
pub(crate) struct LogindClient {
    bus: Bus,
}

/// Opens a connection to the system bus.
pub(crate) fn connect() -> io::Result<UnixStream> {
    let address = std::env::var("DBUS_SYSTEM_BUS_ADDRESS").ok().filter(|address| !address.is_empty());
    dbus::connect(address.as_deref().unwrap_or(SYSTEM_BUS))
}

impl LogindClient {
    /// Subscribes over a new connection.
    ///
    /// # Errors
    /// Fails if no bus answers, or it has no logind.
    pub(crate) fn subscribe(stream: UnixStream) -> io::Result<LogindClient> {
        let mut bus = Bus::handshake(stream)?;
        let rule = format!("type='signal',sender='{SERVICE}',path='{PATH}',interface='{INTERFACE}',member='{SIGNAL}'");
        bus.call_bus("AddMatch", &[&rule])?;
        Ok(LogindClient { bus })
    }

    /// Takes an inhibitor lock: the machine delays its sleep while the descriptor is open, for a
    /// few seconds at most (`InhibitDelayMaxSec=`).
    pub(crate) fn delay_sleep(&mut self) -> io::Result<OwnedFd> {
        let method = BusMethod { destination: SERVICE, path: PATH, interface: INTERFACE, member: "Inhibit" };
        let answer = self.bus.call(&method, &["sleep", "lockbox", "unmounts an encrypted archive", "delay"])?;
        answer.descriptor.ok_or_else(|| io::Error::other("logind gave no lock"))
    }

    /// Waits until the machine is about to sleep (true) or woke up (false).
    pub(crate) fn next_sleep_signal(&mut self) -> io::Result<bool> {
        loop {
            let message = self.bus.next_signal()?;
            if message.interface == INTERFACE && message.member == SIGNAL && self.is_from_logind(&message)? {
                return message.first_bool().ok_or_else(|| io::Error::other("logind's signal is not understood"));
            }
        }
    }

    /// Checks the sender: any program may send this signal, and the bus knows the owner of logind's
    /// name.
    fn is_from_logind(&mut self, message: &BusMessage) -> io::Result<bool> {
        Ok(self.bus.call_bus("GetNameOwner", &[SERVICE])?.first_string().is_some_and(|owner| owner == message.sender))
    }
}
