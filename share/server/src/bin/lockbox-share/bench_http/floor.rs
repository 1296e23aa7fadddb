//! The server of ready-made answers, as a process: the answer comes on standard input.

use std::io::{Read, Write};
use std::net::SocketAddr;

use lockbox_share::http::{floor, listen};

use crate::serve::processors;

pub(crate) fn run() -> Result<(), String> {
    let mut answer = Vec::new();
    std::io::stdin().read_to_end(&mut answer).map_err(|error| format!("cannot read the answer: {error}"))?;
    // For as long as the process lives.
    let answer: &'static [u8] = answer.leak();
    let listen::Tcp { address, listeners } = listen::tcp(SocketAddr::from(([127, 0, 0, 1], 0)), processors())?;
    let serve = move |listener| -> std::io::Result<()> {
        tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(floor::run(listener, answer))
    };
    let threads: Vec<_> = listeners.into_iter().map(|listener| std::thread::spawn(move || serve(listener))).collect();
    let mut out = std::io::stdout().lock();
    writeln!(out, "http={address}\nready=1").and_then(|()| out.flush()).map_err(|error| error.to_string())?;
    for thread in threads {
        thread.join().map_err(|_| "an event loop ended by a panic")?.map_err(|error| error.to_string())?;
    }
    Ok(())
}
