//! Carries HTTP over a Unix socket, for the client library that knows TCP and TLS.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use ureq::unversioned::transport::{Buffers, ConnectionDetails, Connector, LazyBuffers, NextTimeout, Transport, time};

/// Connects to the socket at a path, whatever the address of the request says.
#[derive(Debug)]
pub(super) struct UnixConnector(pub(super) PathBuf);

impl<In: Transport> Connector<In> for UnixConnector {
    type Out = UnixTransport;

    fn connect(&self, details: &ConnectionDetails, _: Option<In>) -> Result<Option<UnixTransport>, ureq::Error> {
        let stream = UnixStream::connect(&self.0)?;
        let config = details.config;
        let buffers = LazyBuffers::new(config.input_buffer_size(), config.output_buffer_size());
        Ok(Some(UnixTransport { stream, buffers }))
    }
}

/// One connection.
#[derive(Debug)]
pub(super) struct UnixTransport {
    stream: UnixStream,
    buffers: LazyBuffers,
}

fn limit(timeout: NextTimeout) -> Option<Duration> {
    timeout.not_zero().map(|left: time::Duration| *left)
}

/// What the library expects when a time-out of the socket passed.
fn timeout_or_failure(error: io::Error, timeout: NextTimeout) -> ureq::Error {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => ureq::Error::Timeout(timeout.reason),
        _ => ureq::Error::Io(error),
    }
}

impl Transport for UnixTransport {
    fn buffers(&mut self) -> &mut dyn Buffers {
        &mut self.buffers
    }

    fn transmit_output(&mut self, amount: usize, timeout: NextTimeout) -> Result<(), ureq::Error> {
        let timeout = timeout.for_write();
        self.stream.set_write_timeout(limit(timeout))?;
        let output = &self.buffers.output()[..amount];
        self.stream.write_all(output).map_err(|error| timeout_or_failure(error, timeout))
    }

    fn await_input(&mut self, timeout: NextTimeout) -> Result<bool, ureq::Error> {
        let timeout = timeout.for_read();
        self.stream.set_read_timeout(limit(timeout))?;
        let amount = loop {
            match self.stream.read(self.buffers.input_append_buf()) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => break result.map_err(|error| timeout_or_failure(error, timeout))?,
            }
        };
        self.buffers.input_appended(amount);
        Ok(amount > 0)
    }

    fn is_open(&mut self) -> bool {
        // Between two requests nothing may be there to read, not even the end.
        let silent = |stream: &UnixStream| -> io::Result<bool> {
            stream.set_nonblocking(true)?;
            let heard = (&*stream).read(&mut [0]);
            stream.set_nonblocking(false)?;
            Ok(heard.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock))
        };
        silent(&self.stream).unwrap_or(false)
    }
}
