//! Which processor a thread runs on.

/// Keep the calling thread on processor `cpu`. A wish: where the system refuses or cannot, nothing happens.
#[cfg(target_os = "linux")]
pub fn pin_thread(cpu: usize) {
    let mut set = rustix::thread::CpuSet::new();
    if cpu < rustix::thread::CpuSet::MAX_CPU {
        set.set(cpu);
        // Refused (a container's limits): the thread runs where the system puts it.
        let _ = rustix::thread::sched_setaffinity(None, &set);
    }
}

/// Keep the calling thread on processor `cpu`: only Linux can.
#[cfg(not(target_os = "linux"))]
pub fn pin_thread(_cpu: usize) {}
