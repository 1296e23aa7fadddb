//! System call filter (seccomp) of the daemon and the fetcher.
//!
//! Landlock binds files and TCP. The filter covers the rest: new sockets, messages to an address,
//! programs, signals and memory of other processes, modes, owners and attributes by path, and all
//! kernel interfaces that our code does not use. [`allowlist`] has the lists, and argues for their
//! margin.
//!
//! # Other calls
//! They fail with ENOSYS, as on a kernel that lacks them, so that C libraries try an older call.
//! Each is logged once by name, by a process outside ([`refusals`]). No process is killed. Calls
//! that later kernels add are on no list.
//!
//! # Order of installing
//! 1  The allow-list, with a listener for all other calls. Two more calls are allowed until step 3:
//!    sendmsg(2) and seccomp(2).
//! 2  The listener is sent to the process outside and closed here: its holder could let a call
//!    continue.
//! 3  A second filter refuses those two, and clone3(2), without the listener: of two filters the
//!    stricter answer counts. Without seccomp(2) no thread can install a filter with a listener of
//!    its own over the first one; the listener of that may be gone.
//!
//! If the kernel gives no listener (before 5.0, or in a container that has one), the same calls
//! fail without being logged. If the kernel or the architecture does not support the filter, the
//! process runs without one.
//!
//! A filter binds the installing thread and its descendants, so it is installed before any other
//! thread starts, as Landlock is.

mod allowlist;
mod refusals;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::thread;

use nix::errno::Errno;
use nix::libc::{self, c_long, c_ulong};
use seccompiler::{
    BackendError, BpfProgram, BpfProgramRef, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch,
};

use crate::mount::receive_descriptor;
use allowlist::ArgumentRule;
pub(crate) use allowlist::ConfinedProcess;

/// Marks the listener's action in a compiled program, which the crate does not support.
const LISTENER_MARK: SeccompAction = SeccompAction::Trace(0);
const ENOSYS_ACTION: SeccompAction = SeccompAction::Errno(libc::ENOSYS as u32);
/// BPF_RET | BPF_K.
const RETURN: u16 = 0x06;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RefusalLogging {
    Logged,
    /// The kernel gave no listener, or it could not be sent.
    Silent,
}

/// Installs the filter on this thread and its descendants. `hand_over` sends the listener to the
/// process that calls [`log_refusals`]. Fails if the kernel or the architecture does not
/// support the filter: nothing is refused then.
pub(crate) fn enter(
    process: ConfinedProcess,
    hand_over: impl FnOnce(&OwnedFd) -> io::Result<()>,
) -> Result<RefusalLogging, String> {
    let written = |error: BackendError| error.to_string();
    rustix::thread::set_no_new_privs(true).map_err(|error| error.to_string())?;
    let asking = with_listener_action(build_allow_list(process, LISTENER_MARK).map_err(written)?);
    let refusals = match install_with_listener(&asking) {
        Ok(listener) => match hand_over(&listener) {
            Ok(()) => RefusalLogging::Logged,
            Err(error) => {
                tracing::info!("refused system calls will not be named: {error}");
                RefusalLogging::Silent
            }
        },
        Err(error) => {
            tracing::info!("refused system calls will not be named: {error}");
            install(&build_allow_list(process, ENOSYS_ACTION).map_err(written)?)?;
            RefusalLogging::Silent
        }
    };
    install(&build_second_list(process).map_err(written)?)?;
    Ok(refusals)
}

/// Receives the listener of a filter, and answers and logs refused calls in a thread. Without a
/// listener the kernel refuses them by itself.
pub(crate) fn log_refusals(socket: &UnixStream, process: &'static str) {
    let Some(listener) = receive_descriptor(socket) else { return };
    let log = move |call: &str| {
        tracing::warn!(
            "the {process} was refused the system call {call}, which its sandbox does not allow; please report it"
        );
    };
    let answer = move || {
        if let Err(error) = refusals::serve(&listener, log) {
            tracing::info!("refused system calls are no longer logged: {error}");
        }
    };
    if let Err(error) = thread::Builder::new().name("refusals".into()).spawn(answer) {
        tracing::info!("refused system calls will not be named: {error}");
    }
}

/// Returns the alternative condition lists of a call, of which one must hold completely; empty for
/// a call that is always allowed.
fn alternatives(allowed: &ArgumentRule, own: u32) -> Result<Vec<Vec<SeccompCondition>>, BackendError> {
    use SeccompCmpArgLen::{Dword, Qword};
    use SeccompCmpOp::{Eq, MaskedEq};
    let condition = SeccompCondition::new;
    let one = |condition: SeccompCondition| vec![vec![condition]];
    Ok(match *allowed {
        ArgumentRule::Always => Vec::new(),
        ArgumentRule::OneOf(index, values) => values
            .iter()
            .map(|&value| condition(index, Dword, Eq, value.into()).map(|is| vec![is]))
            .collect::<Result<_, BackendError>>()?,
        ArgumentRule::Null(index) => one(condition(index, Qword, Eq, 0)?),
        ArgumentRule::Without(index, bits) => one(condition(index, Dword, MaskedEq(bits.into()), 0)?),
        ArgumentRule::Bits(index, mask, bits) => one(condition(index, Dword, MaskedEq(mask.into()), bits.into())?),
        ArgumentRule::OwnPid(index) => one(condition(index, Dword, Eq, own.into())?),
        ArgumentRule::Both(first, second) => {
            let (first, second) = (alternatives(first, own)?, alternatives(second, own)?);
            first
                .iter()
                .flat_map(|one| second.iter().map(|other| [one.as_slice(), other.as_slice()].concat()))
                .collect()
        }
    })
}

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

fn build_rules(allowed: &ArgumentRule) -> Result<Vec<SeccompRule>, BackendError> {
    alternatives(allowed, std::process::id())?.into_iter().map(SeccompRule::new).collect()
}

fn compile(rules: Rules, otherwise: SeccompAction, listed: SeccompAction) -> Result<BpfProgram, BackendError> {
    SeccompFilter::new(rules, otherwise, listed, TargetArch::try_from(std::env::consts::ARCH)?)?.try_into()
}

/// Builds the allow-list, with the calls that [`enter`] needs until the second filter.
fn build_allow_list(process: ConfinedProcess, otherwise: SeccompAction) -> Result<BpfProgram, BackendError> {
    /// SECCOMP_SET_MODE_FILTER, without flags.
    const SECOND: ArgumentRule = ArgumentRule::Both(&ArgumentRule::OneOf(0, &[1]), &ArgumentRule::Null(1));
    let mut list = Rules::new();
    for (call, allowed) in process.allowed() {
        list.insert(call, build_rules(allowed)?);
    }
    list.insert(libc::SYS_seccomp, build_rules(&SECOND)?);
    list.entry(libc::SYS_sendmsg).or_default();
    compile(list, otherwise, SeccompAction::Allow)
}

/// Builds the second filter: refuses the calls that only the installation needed, and the calls
/// that are refused without a log line.
fn build_second_list(process: ConfinedProcess) -> Result<BpfProgram, BackendError> {
    let mut list: Rules = allowlist::UNLOGGED.iter().map(|&call| (call, Vec::new())).collect();
    list.insert(libc::SYS_seccomp, Vec::new());
    if process == ConfinedProcess::Daemon {
        list.insert(libc::SYS_sendmsg, Vec::new());
    }
    compile(list, SeccompAction::Allow, ENOSYS_ACTION)
}

fn with_listener_action(mut program: BpfProgram) -> BpfProgram {
    let mark = u32::from(LISTENER_MARK);
    for instruction in program.iter_mut().filter(|it| it.code == RETURN && it.k == mark) {
        instruction.k = libc::SECCOMP_RET_USER_NOTIF;
    }
    program
}

fn install(program: BpfProgramRef<'_>) -> Result<(), String> {
    seccompiler::apply_filter(program).map_err(|error| match error {
        seccompiler::Error::Prctl(error) | seccompiler::Error::Seccomp(error) => error.to_string(),
        other => other.to_string(),
    })
}

/// Installs a filter with a listener, which the crate cannot do.
fn install_with_listener(program: BpfProgramRef<'_>) -> io::Result<OwnedFd> {
    let len = u16::try_from(program.len()).map_err(io::Error::other)?;
    let filter = libc::sock_fprog { len, filter: program.as_ptr().cast::<libc::sock_filter>().cast_mut() };
    let (mode, flags): (c_ulong, c_ulong) =
        (libc::SECCOMP_SET_MODE_FILTER.into(), libc::SECCOMP_FILTER_FLAG_NEW_LISTENER);
    // SAFETY: the kernel copies `len` instructions from the program, which has as many, of the
    // layout of the kernel's struct, and lives until after the call. It writes nothing.
    let result: c_long = unsafe { libc::syscall(libc::SYS_seccomp, mode, flags, &raw const filter) };
    let descriptor = RawFd::try_from(Errno::result(result)?).map_err(io::Error::other)?;
    // SAFETY: the kernel has just made this descriptor for this call, so nobody else owns it. It
    // is closed on exec.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

#[cfg(test)]
mod tests;
