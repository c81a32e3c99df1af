package load

import (
	"time"

	"github.com/fencelab/fencelab/scenarios/history"
)

// Config is a lock and the load to offer to it. Durations are strings in JSON, as in "50ms".
type Config struct {
	// Distinguishes runs of one experiment; optional.
	Name string `json:"name,omitempty"`
	// A lock of cmd/contend.
	Backend string `json:"backend"`
	// The most acquisitions at a time. In the closed model each contender acquires, holds and releases repeatedly. In the open model
	// they serve arrivals in order; waiting for one is part of the wait.
	Contenders int `json:"contenders"`
	// Clients that the contenders share.
	Connections int `json:"connections"`
	// GOMAXPROCS, which the caller of [Run] sets; 0: all, shared with a server on the same host.
	Processors int `json:"processors,omitempty"`
	// 1 is a hot key.
	Keys uint64 `json:"keys"`
	// Poisson arrivals per second: the open model. 0: the closed model.
	Rate float64  `json:"rate,omitempty"`
	Work Duration `json:"work"` // how long a holder holds
	TTL  Duration `json:"ttl"`
	// Added to each message in each direction, see [Wires].
	Delay    Duration `json:"delay,omitempty"`
	Warmup   Duration `json:"warmup"`   // load before the window
	Duration Duration `json:"duration"` // of the window, the measured part
	// Determines keys and arrivals.
	Seed uint64 `json:"seed"`
	// Of repeated runs, from 1; 0: not repeated.
	Round int `json:"round,omitempty"`
	// Begins every key. Runs with the same prefix contend.
	Prefix string `json:"-"`
}

// Result is the result of a run, one line of a data.jsonl.
//
// An acquisition counts if it was granted or failed in the window, whenever it arrived. Those that still waited at the end are
// Unserved. [Estimate] counts all three. BacklogStart + Arrivals = Sections + Failed + Unserved.Count.
//
// A wait counts from when the arrival was due (open model) or from the call (closed model).
type Result struct {
	Config  Config    `json:"config"`
	Machine Machine   `json:"machine"`
	Start   time.Time `json:"start"`     // of the window
	Seconds float64   `json:"seconds"`   // length of the window; less than Config.Duration if cut short
	Cut     bool      `json:"cut_short"` // by the user

	Arrivals     int64   `json:"arrivals"` // in the window
	Sections     int64   `json:"sections"` // grants
	SectionsPerS float64 `json:"sections_per_s"`
	Failed       int64   `json:"failed"`
	BacklogStart int64   `json:"backlog_start"` // waiting when the window began
	MaxWaiting   int64   `json:"max_waiting"`
	Unstarted    int64   `json:"unstarted"` // open model: of Unserved, those for which no contender was free

	Wait     Latency `json:"wait"`     // arrival to grant
	Unserved Latency `json:"unserved"` // arrival to the end of the window
	Hold     Latency `json:"hold"`     // grant to the start of the release
	Release  Latency `json:"release"`
	Pacer    Latency `json:"pacer"` // open model: how late arrivals were offered, a part of their waits
	// Arrival to error.
	FailedAfter Latency `json:"failed_after,omitzero"`

	// By kind: "acquire: network", "release: lost".
	Errors map[string]Errors `json:"errors,omitempty"`
	Order  Order             `json:"order"`
	Share  Share             `json:"share"`
	Checks Checks            `json:"checks"`

	Samples []Sample `json:"samples"`
}

// Machine is where a run was made.
type Machine struct {
	OS      string `json:"os"`
	Arch    string `json:"arch"`
	Cores   int    `json:"cores"`
	Used    int    `json:"gomaxprocs,omitempty"` // by each process of the load; 0: unknown
	Go      string `json:"go"`
	GC      int    `json:"gogc,omitempty"`    // GOGC of the load, in per cent; -1: off; 0: unknown
	Server  string `json:"server,omitempty"`  // as in "3 × etcd 3.6.16 (local)"; empty: unknown
	Library string `json:"library,omitempty"` // module and version of another library's lock
}

// Latency is a distribution of times in milliseconds.
type Latency struct {
	Count int64   `json:"count"`
	Mean  float64 `json:"mean_ms"`
	Min   float64 `json:"min_ms"`
	P50   float64 `json:"p50_ms"`
	P90   float64 `json:"p90_ms"`
	P99   float64 `json:"p99_ms"`
	P999  float64 `json:"p999_ms"`
	Max   float64 `json:"max_ms"`
	// A HdrHistogram of nanoseconds with 3 significant digits in the V2 compressed encoding, base64.
	HDR string `json:"hdr,omitempty"`
}

// Errors is how often something failed, and the first message.
type Errors struct {
	Count   int64  `json:"count"`
	Example string `json:"example"`
}

// Order compares the orders of arrival and of grants, for each key. Grants are ordered by token or, without tokens, as the
// process saw them. Acquisitions that still waited at the end count as granted last.
//
// An acquisition is overtaken by one that arrived later and was granted earlier. Even a strict FIFO lock shows a few, overtaken
// on the way to the server.
type Order struct {
	By         string `json:"by"`         // "token" or "grant"; empty: nothing was granted
	Count      int64  `json:"count"`      // granted and unserved
	Inversions int64  `json:"inversions"` // pairs of the same key granted in the other order
	Reordered  int64  `json:"reordered"`
	// How often an acquisition was overtaken. Mean is Inversions / Count.
	Mean float64 `json:"mean"`
	P99  int64   `json:"p99"`
	Max  int64   `json:"max"`
}

// Share is how critical sections were shared among contenders (closed model only).
type Share struct {
	// Jain's fairness index of Counts, (Σx)² / (n·Σx²): 1 if all have the same, 1/n if one has everything. With few critical
	// sections per contender, rounding alone keeps it below 1.
	Jain float64 `json:"jain,omitempty"`
	Min  int64   `json:"min"`
	Max  int64   `json:"max"`
	// Without counts contenders without a critical section. Starved are those of them that were overtaken by at least a tenth as
	// many acquisitions as there are contenders; for the others the run may have been too short.
	Without int     `json:"without"`
	Starved int     `json:"starved"`
	Counts  []int64 `json:"counts,omitempty"` // of each contender
}

// Checks counts broken promises, also in the warm-up, as far as one process can see.
type Checks struct {
	// Grants of a key while its holder was in its critical section and not notified of the end of its lease.
	Overlaps int64 `json:"overlaps"`
	// Grants of a key whose token wasn't greater than the one before.
	TokenRegressions int64 `json:"token_regressions"`
	// Grants of a key while its holder was in its critical section after its lease had ended.
	Late int64 `json:"late"`
}

// Sample is one interval of the window.
type Sample struct {
	T        float64 `json:"t"`        // seconds from the start of the window to the end of the interval
	Sections int64   `json:"sections"` // grants
	Failed   int64   `json:"failed,omitempty"`
	P50      float64 `json:"p50_ms"` // of the waits that ended in the interval
	P99      float64 `json:"p99_ms"`
	Waiting  int64   `json:"waiting"` // at its end
}

// Duration is a string in JSON, "1.5s".
type Duration = history.Duration
