//! The servers that are measured, each in a process of its own.

use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::serve::Mode;

/// A server in a process of its own, ended with the measurement.
pub(super) struct Server {
    child: Child,
    pub(super) address: SocketAddr,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    pub(super) fn start(mut command: Command, input: Option<&[u8]>) -> Result<Server, String> {
        command.stdin(if input.is_some() { Stdio::piped() } else { Stdio::null() }).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(|error| format!("the server does not start: {error}"))?;
        if let (Some(bytes), Some(mut stdin)) = (input, child.stdin.take()) {
            stdin.write_all(bytes).map_err(|error| format!("the server does not listen to its input: {error}"))?;
        }
        let stdout = child.stdout.take().ok_or("the server has no output")?;
        let mut address = None;
        for line in BufReader::new(stdout).lines() {
            let line = line.map_err(|error| error.to_string())?;
            match line.split_once('=') {
                Some(("http", text)) => address = text.parse().ok(),
                Some(("ready", _)) => break,
                _ => {}
            }
        }
        match address {
            Some(address) => Ok(Server { child, address }),
            None => {
                let _ = child.wait();
                Err("the server ended before it was ready".into())
            }
        }
    }

    /// Seconds of processor time that the process has used.
    pub(super) fn cpu(&self) -> f64 {
        let text = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap_or_default();
        // Behind the name, which is in brackets and may hold anything: fields 14 and 15 of proc(5),
        // in ticks of 10 ms.
        let fields: Vec<&str> = text.rsplit_once(") ").map(|(_, rest)| rest.split(' ').collect()).unwrap_or_default();
        let ticks = |place: usize| fields.get(place).and_then(|text| text.parse::<f64>().ok()).unwrap_or(0.0);
        (ticks(11) + ticks(12)) / 100.0
    }
}

/// Returns the command of a daemon without rate limits.
pub(super) fn serve(program: &Path, state: &Path, durability: Mode) -> Command {
    let mut command = Command::new(program);
    command.args(["serve", "--listen", "127.0.0.1:0", "--unix-socket", "none", "--metrics-listen", "none"]);
    command.args(["--requests-per-minute", "0", "--max-connections", "100000", "--durability"]);
    command.arg(durability.word()).arg("--state-dir").arg(state).env("LOCKBOX_LOG", "warn");
    command
}
