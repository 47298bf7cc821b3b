//! An idle pool uses no processor time. A file of its own, for its process has no other threads of that name.
#![cfg(target_os = "linux")]

use std::fs;
use std::thread::yield_now;
use std::time::{Duration, Instant};

use octavo_cpu::ThreadPool;

/// State (R: runs or wants to, S: sleeps) of each worker.
fn states() -> Vec<String> {
    let tasks = fs::read_dir("/proc/self/task").expect("threads of this process");
    let lines = tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("stat")).ok());
    lines
        .filter(|line| line.contains("(octavo-cpu-"))
        .filter_map(|line| Some(line.rsplit_once(") ")?.1[..1].to_owned()))
        .collect()
}

#[test]
fn workers_of_an_idle_pool_sleep() {
    let pool = ThreadPool::new(3);
    for _ in 0..100 {
        pool.run(&|team| team.barrier());
    }
    let deadline = Instant::now() + Duration::from_secs(20);
    while states() != ["S", "S"] {
        assert!(Instant::now() < deadline, "{:?}", states());
        yield_now();
    }
}
