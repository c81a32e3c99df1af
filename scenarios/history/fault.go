package history

// Fault is a fault of a worker, the resource or a server. Package scenarios injects it, or internal/open if only one lock's
// servers have it.
type Fault struct {
	Name string
	Undo string // the undo's name; empty: none
	From bool   // it is between its target and the servers named after it

	State State
	Needs string // a clock, replica or network of the server's own, see scenarios/servers_test.go

	Label    string // in a drawing, after the target's name
	Sentence string // in a list; {target}, {from} and {detail} are replaced
}

// State is the state of a fault's target.
type State int

// States, of the faults that need one.
const (
	Frozen State = iota + 1
	Down
	Delayed // its requests to the resource are held in the network
	CutOff
)

// Faults are all faults and their undos.
var Faults = []Fault{
	// of processes
	{Name: "pause", Undo: "resume", State: Frozen, Label: " frozen", Sentence: "froze {target} (SIGSTOP)"},
	{Name: "resume", Label: " resumed", Sentence: "resumed {target} (SIGCONT)"},
	{Name: "kill", Undo: "restart", State: Down, Label: " killed", Sentence: "killed {target} (SIGKILL)"},
	{Name: "restart", Label: " restarted", Sentence: "restarted {target}"},

	// of a worker's network
	{
		Name: "hold", Undo: "deliver", State: Delayed, Label: " link held",
		Sentence: "began to hold in the network what {target} sends to the resource",
	},
	{Name: "deliver", Label: " link delivers", Sentence: "delivered what {target} had sent"},
	{
		Name: "cut", Undo: "mend", From: true, State: CutOff, Label: " cut off from",
		Sentence: "cut {target} off from {from}: what is sent either way is lost",
	},
	{
		Name: "refuse", Undo: "mend", From: true, Label: " refused by",
		Sentence: "cut {target} off from {from}: connections are refused",
	},
	{Name: "mend", Label: " reconnected", Sentence: "connected {target} again"},

	// of the lock's servers
	{
		Name: "isolate", Undo: "rejoin", Needs: "network", Label: " isolated",
		Sentence: "cut {target} off from its peers, not from clients",
	},
	{Name: "rejoin", Label: " rejoins", Sentence: "connected {target} with its peers again"},
	{Name: "wipe", Label: " restarted empty", Sentence: "killed {target} and restarted it without its data"},
	{Name: "jump", Needs: "clock", Label: ": clock jumps", Sentence: "let the clock of {target} jump by {detail}"},
	{Name: "deny", Undo: "allow", Label: " denies writes", Sentence: "made {target} answer writes with errors"},
	{Name: "allow", Label: " allows writes", Sentence: "let {target} accept writes again"},
	{Name: "flush", Label: " flushed", Sentence: "deleted all data of {target}"},
	{Name: "evict", Label: " evicts its keys", Sentence: "made {target} run out of memory, so that it evicted its keys"},
	{Name: "lag", Needs: "replica", Label: ": replica stops", Sentence: "stopped the replication from {target} to its replica"},
	{Name: "failover", Label: ": replica takes over", Sentence: "made the replica of {target} the primary"},
	{Name: "snapshot", Label: ": snapshot taken", Sentence: "took a snapshot of {target}"},
	{Name: "restore", Label: ": restored", Sentence: "restored {target} from the snapshot"},
	{
		Name: "reap", Label: ": idle lock deleted",
		Sentence: "deleted on {target} what it kept of a lock that nobody held or waited for",
	},
}

// FaultNamed returns the fault of that name.
func FaultNamed(name string) (Fault, bool) {
	for _, f := range Faults {
		if f.Name == name {
			return f, true
		}
	}
	return Fault{}, false
}
