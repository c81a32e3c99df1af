package scenarios

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/internal/job"
	"github.com/fencelab/fencelab/internal/server"
	"github.com/fencelab/fencelab/internal/stores"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/boltstore"
	"github.com/fencelab/fencelab/scenarios/history"
)

// Lock is what a scenario needs of a lock; [FromLocker] makes one of a *dlock.Locker.
//
//	Acquire(ctx context.Context, key string) (Lease, error)    // waits
//	TryAcquire(ctx context.Context, key string) (Lease, error) // wraps dlock.ErrHeld when another holder has it
//	Close() error
type Lock = job.Lock

// Lease is what a scenario needs of a grant; a *dlock.Handle is one.
//
//	Fence() uint64                     // the fencing token, from 1
//	TTL() time.Duration                // how long the lease lasts, from the grant
//	Until() time.Time                  // when it must be presumed lost unless it is renewed
//	Context() context.Context          // ends when it is, or must be presumed, lost
//	Release(ctx context.Context) error // wraps dlock.ErrLost when the lock was no longer the lease's
type Lease = job.Lease

// FromLocker makes a [Lock] of a Locker.
func FromLocker(l *dlock.Locker) Lock { return job.FromLocker(l) }

// Open opens the lock that a worker uses, in the worker's process.
type Open func(ctx context.Context, s LockSpec) (Lock, error)

// LockSpec says what lock a worker needs.
type LockSpec struct {
	Lock    string        // the Service's Lock: which lock
	Addrs   []string      // those of the Service's Nodes: where its servers are
	TTL     time.Duration // of the leases
	Renew   bool          // renew them in the background, which WedgedHolder finds out,
	MaxHold time.Duration // for so long
	// MinSession is the shortest session that the servers allow; 0: what is usual.
	MinSession time.Duration
	// Variant, if not empty, asks for a lock that is built wrongly in a certain way. Open returns an error for one that it
	// doesn't know.
	Variant string
	// Gap, if not nil, asks for a release that is not atomic: GET, Gap, DEL. A lock that has no such release returns an error.
	Gap func() error
}

// wedged is for how long a lease is renewed at most; no run takes so long.
const wedged = time.Hour

// childEnv tells a process that it is a child, and which.
const childEnv = "FENCELAB_SCENARIO_CHILD"

// The files that a child inherits beside the standard ones.
const (
	eventsFile  = 3 // messages to the controller
	controlFile = 4 // lines from it
	listenFile  = 5 // the resource's listener, which outlives its process
)

// childSpec is what childEnv holds, as JSON.
type childSpec struct {
	Name    string          `json:"name"` // a worker's name, or Resource
	Fencing history.Fencing `json:"fencing"`

	// of a worker
	Key    string `json:"key,omitempty"`
	Second string `json:"second,omitempty"` // another ledger, to which the worker appends too
	URL    string `json:"url,omitempty"`
	// Straight says that URL is that of a store, and not of an HTTP resource.
	Straight bool `json:"straight,omitempty"`

	Lock    string   `json:"lock,omitempty"`
	Addrs   []string `json:"addrs,omitempty"`
	Variant string   `json:"variant,omitempty"`

	MinSession time.Duration `json:"min_session,omitempty"`
	TTL        time.Duration `json:"ttl,omitempty"`
	Sent       bool          `json:"sent,omitempty"` // the schedule waits for history.Sent
	Worker     Worker        `json:"worker,omitzero"`

	// of the resource
	File string `json:"file,omitempty"`
}

// message is a line from a child to the controller.
type message struct {
	Event  *history.Event `json:"event,omitempty"`
	Stops  bool           `json:"stops,omitempty"`  // a worker waits for a line before it goes on
	Synced int            `json:"synced,omitempty"` // the resource has answered a sync; all earlier decisions came before
}

// Child plays the role of a worker or of the resource if this process was started as one, and then doesn't return.
// Call it first in main or TestMain, with the function that opens the lock under test.
func Child(open Open) {
	text, ok := os.LookupEnv(childEnv)
	if !ok {
		return
	}
	if err := child(text, open); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func child(text string, open Open) error {
	var spec childSpec
	if err := json.Unmarshal([]byte(text), &spec); err != nil {
		return fmt.Errorf("scenarios: %s: %w", childEnv, err)
	}
	l := &line{out: json.NewEncoder(os.NewFile(eventsFile, "events")), in: bufio.NewScanner(os.NewFile(controlFile, "control"))}
	if spec.Name == Resource {
		return resourceChild(&spec, l)
	}
	return workerChild(&spec, l, open)
}

// line connects a child with the controller.
type line struct {
	mu  sync.Mutex
	out *json.Encoder
	in  *bufio.Scanner
}

func (l *line) send(m message) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.out.Encode(m)
}

var errControllerGone = errors.New("scenarios: the controller is gone")

// wait waits for a line from the controller.
func (l *line) wait() (string, error) {
	if !l.in.Scan() {
		return "", errors.Join(errControllerGone, l.in.Err())
	}
	return l.in.Text(), nil
}

// stop reports e and waits until the controller lets the child go on.
func (l *line) stop(e history.Event) error {
	if err := l.send(message{Event: &e, Stops: true}); err != nil {
		return err
	}
	_, err := l.wait()
	return err
}

func workerChild(spec *childSpec, l *line, open Open) error {
	err := work(spec, l, open)
	e := history.Event{Time: time.Now(), Kind: history.KindReport, Name: history.Done}
	if err != nil {
		e.Name, e.Error = history.Failed, err.Error()
	}
	return l.send(message{Event: &e})
}

func work(spec *childSpec, l *line, open Open) (err error) {
	ctx := context.Background()
	ls := LockSpec{
		Lock: spec.Lock, Addrs: spec.Addrs, Variant: spec.Variant, TTL: spec.TTL, MinSession: spec.MinSession,
		Renew: !spec.Worker.NoRenew, MaxHold: cmp.Or(time.Duration(spec.Worker.MaxHold), wedged),
	}
	if spec.Worker.GetThenDel {
		ls.Gap = func() error {
			return l.stop(history.Event{Time: time.Now(), Kind: history.KindReport, Name: history.ReleaseGap})
		}
	}
	lock, err := open(ctx, ls)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lock.Close()) }()
	store, err := openStore(ctx, spec)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	j := job.Job{
		Lock: lock, Store: store, Key: spec.Key, Second: spec.Second, Entry: spec.Name,
		Idle: spec.Worker.Idle, Outlive: spec.Worker.Outlive,
		FencedRead: spec.Fencing == history.FencingOn, Try: spec.Worker.Try, Check: spec.Worker.Check, Sent: spec.Sent,
		At: func(e history.Event) error {
			if e.Name == history.Held || e.Name == history.Sent { // what follows is a wait, in which the worker is free
				return l.send(message{Event: &e})
			}
			return l.stop(e)
		},
	}
	_, err = j.Run(ctx) // a refusal is reported by the job, and no failure
	return err
}

// ledgers is what a worker's ledgers are in.
type ledgers interface {
	job.Store
	Close() error
}

// openStore connects a worker to its ledgers. There is a connection for each call: one that was kept from before a fault would
// make the outcome depend on whether its end is noticed before or after the next call leaves.
func openStore(ctx context.Context, spec *childSpec) (ledgers, error) {
	if !spec.Straight {
		transport := &http.Transport{DisableKeepAlives: true}
		return resource.NewClient(spec.URL, &resource.ClientOptions{
			HTTPClient: &http.Client{Transport: transport}, AllowUnfenced: spec.Fencing == history.FencingOff,
		})
	}
	s, err := stores.Open(ctx, spec.URL, stores.Options{
		// Where a call is held in the network, it is to be the call, and not the greeting of a new connection.
		Fresh: !spec.Sent, Prepared: true,
	})
	if err != nil || spec.Fencing != history.FencingOff {
		return s, err
	}
	return s.Unfenced(), nil
}

func resourceChild(spec *childSpec, l *line) error {
	f := os.NewFile(listenFile, "listener")
	listener, err := net.FileListener(f) // on a duplicate
	if err := errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("scenarios: resource: %w", err)
	}
	store, err := boltstore.Open(spec.File, nil)
	if err != nil {
		return errors.Join(err, listener.Close())
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	go func() { cancel(answerSyncs(l)) }()
	err = server.Serve(ctx, listener, store, server.Options{
		RequestTimeout: 24 * time.Hour, // a request that is held in the network is the point of some scenarios
		Handler: resource.HandlerOptions{
			Unfenced: spec.Fencing == history.FencingOff,
			Observer: func(d resource.Decision) { _ = l.send(message{Event: decided(d)}) }, // a dead controller ends us anyway
		},
	})
	return errors.Join(err, quiet(context.Cause(ctx)))
}

// answerSyncs answers the controller until it is gone, which ends the resource.
func answerSyncs(l *line) error {
	for {
		text, err := l.wait()
		if err != nil {
			return err
		}
		var n int
		if _, err := fmt.Fscanf(strings.NewReader(text), "sync %d", &n); err != nil {
			return fmt.Errorf("scenarios: resource: control line %q: %w", text, err)
		}
		if err := l.send(message{Synced: n}); err != nil {
			return err
		}
	}
}

// quiet is err unless it says that the controller has closed its end, which is how the resource is told to stop.
func quiet(err error) error {
	if errors.Is(err, errControllerGone) {
		return nil
	}
	return err
}

func decided(d resource.Decision) *history.Event {
	return &history.Event{
		Time: time.Now(), Kind: history.KindDecision, Op: string(d.Op), Key: d.Key,
		Token: d.Fence.Token, Seq: d.Fence.Seq, Seen: d.Seen.Token, SeenSeq: d.Seen.Seq,
		Accepted: d.Accepted, Enforced: d.Enforced, Value: string(d.Value),
	}
}

// readMessages delivers a child's messages until it closes its end, and then closes ch.
func readMessages(r io.Reader, ch chan<- message) {
	defer close(ch)
	dec := json.NewDecoder(r)
	for {
		var m message
		if err := dec.Decode(&m); err != nil {
			return // the end, or cut off in the middle of a line by a kill
		}
		ch <- m
	}
}
