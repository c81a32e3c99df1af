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
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/internal/job"
	"github.com/fencelab/fencelab/internal/server"
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
//	Fence() uint64                     // the fencing token, from 1; 0 of a lock that has none, which is played with fencing off
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
	Renew   bool          // renew them in the background, which HolderPartitioned and WedgedHolder find out,
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
	// Own, if not empty, is the name of the user's store: a worker's if that is Straight, or the resource's.
	Own string `json:"own,omitempty"`

	Lock    string   `json:"lock,omitempty"`
	Addrs   []string `json:"addrs,omitempty"`
	Variant string   `json:"variant,omitempty"`

	MinSession time.Duration `json:"min_session,omitempty"`
	TTL        time.Duration `json:"ttl,omitempty"`
	Sent       bool          `json:"sent,omitempty"` // the schedule waits for history.Sent
	Worker     Worker        `json:"worker,omitzero"`

	// of the resource
	Dir string `json:"dir,omitempty"` // where its data is
}

// message is a line from a child to the controller.
type message struct {
	Event  *history.Event `json:"event,omitempty"`
	Stops  bool           `json:"stops,omitempty"`  // a worker waits for a line before it goes on
	Synced int            `json:"synced,omitempty"` // the resource has answered a sync; all earlier decisions came before

	Error       string `json:"error,omitempty"`       // the resource can't be served
	Unsupported bool   `json:"unsupported,omitempty"` // and nothing is wrong with it
}

// Child plays the role of a worker or of the resource if this process was started as one, and then doesn't return.
// Call it first in main or TestMain, with the function that opens the lock under test.
func Child(open Open) { ChildWithStore(open, nil) }

// ChildWithStore is [Child] for runs over a [Store] of one's own: the same function as in its Open opens that.
func ChildWithStore(open Open, store OpenStore) {
	text, ok := os.LookupEnv(childEnv)
	if !ok {
		return
	}
	if err := child(text, open, store); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func child(text string, open Open, store OpenStore) error {
	var spec childSpec
	if err := json.Unmarshal([]byte(text), &spec); err != nil {
		return fmt.Errorf("scenarios: %s: %w", childEnv, err)
	}
	l := &line{out: json.NewEncoder(os.NewFile(eventsFile, "events")), in: bufio.NewScanner(os.NewFile(controlFile, "control"))}
	if spec.Name == Resource {
		return resourceChild(&spec, l, store)
	}
	return workerChild(&spec, l, open, store)
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

func workerChild(spec *childSpec, l *line, open Open, store OpenStore) error {
	err := work(spec, l, open, store)
	e := history.Event{Time: time.Now(), Kind: history.KindReport, Name: history.Done}
	if err != nil {
		e.Name, e.Error = history.Failed, err.Error()
	}
	return l.send(message{Event: &e})
}

func work(spec *childSpec, l *line, open Open, own OpenStore) (err error) {
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
	if lock == nil {
		return errors.New("open: got no lock and no error")
	}
	defer func() { err = errors.Join(err, lock.Close()) }()
	lock = vetted{lock, spec}
	store, err := openStore(ctx, spec, own)
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

// vetted is a lock whose grants are looked at before they count.
type vetted struct {
	Lock
	spec *childSpec
}

func (l vetted) Acquire(ctx context.Context, key string) (Lease, error) {
	return l.take(ctx, func() (Lease, error) { return l.Lock.Acquire(ctx, key) })
}

func (l vetted) TryAcquire(ctx context.Context, key string) (Lease, error) {
	return l.take(ctx, func() (Lease, error) { return l.Lock.TryAcquire(ctx, key) })
}

// take acquires the lock. Where the schedule ends renewals, it takes it again until a lease has been renewed: one that is not,
// because nobody does or the machine stood still, would end without the schedule's doing.
func (l vetted) take(ctx context.Context, acquire func() (Lease, error)) (Lease, error) {
	how := l.spec.Worker
	n := max(2, min(maxTries, int(DefaultStepTimeout/2/max(l.spec.TTL, time.Millisecond)))) // within a step
	for range n {
		lease, err := acquire()
		if err != nil {
			return nil, err
		}
		if err := l.check(lease); err != nil {
			return nil, err
		}
		if !how.Outlive || how.NoRenew || renewed(ctx, lease) {
			return lease, nil
		}
		_ = lease.Release(ctx) // it is lost
	}
	return nil, fmt.Errorf("the lock's lease has ended %d times without being renewed: with LockSpec.Renew the lock is to renew it in the "+
		"background, and Lease.Until to tell; if it is one that doesn't, set Service.NoRenew", n)
}

func (l vetted) check(lease Lease) error {
	switch {
	case lease == nil:
		return errors.New("the lock has returned neither a lease nor an error")
	case lease.Until().IsZero():
		return errors.New("Lease.Until is the zero time: it tells when the lease must be presumed lost")
	case lease.Fence() == 0 && l.spec.Fencing != history.FencingOff:
		return fmt.Errorf("the lock has granted a lease without a fencing token, Lease.Fence is 0: with fencing %s the resource has "+
			"nothing to compare; if it is a lock that has none, set Service.NoTokens, and see with fencing off what becomes of the data",
			l.spec.Fencing)
	}
	return nil
}

// renewed waits until the lease is renewed, and reports whether it was.
func renewed(ctx context.Context, lease Lease) bool {
	first := lease.Until()
	look := time.NewTicker(2 * time.Millisecond)
	defer look.Stop()
	for !lease.Until().After(first) {
		select {
		case <-look.C:
			if time.Since(first) > 0 { // of a context that goes on there is more to say later
				return false
			}
		case <-lease.Context().Done():
			return false
		case <-ctx.Done():
			return false
		}
	}
	return true
}

// ledgers is what a worker's ledgers are in.
type ledgers interface {
	job.Store
	Close() error
}

// openStore connects a worker to its ledgers. There is a connection for each call: one that was kept from before a fault would
// make the outcome depend on whether its end is noticed before or after the next call leaves.
func openStore(ctx context.Context, spec *childSpec, own OpenStore) (ledgers, error) {
	off := spec.Fencing == history.FencingOff
	if !spec.Straight {
		transport := &http.Transport{DisableKeepAlives: true}
		c, err := resource.NewClient(spec.URL, &resource.ClientOptions{HTTPClient: &http.Client{Transport: transport}, AllowUnfenced: off})
		return client{c}, err
	}
	s, err := openOwn(ctx, own, StoreSpec{Store: spec.Own, Addr: spec.URL, Worker: true, Held: spec.Sent})
	if err != nil || !off {
		return workerStore{Store: s}, err
	}
	bare, err := overwriter(spec.Own, s)
	return workerStore{s, bare}, err
}

// client is the HTTP resource as a worker sees it. One whose lock has no tokens writes without.
type client struct{ *resource.Client }

func (c client) Write(ctx context.Context, key string, f resource.Fence, value []byte) error {
	if f.Token == 0 {
		return c.WriteUnfenced(ctx, key, value)
	}
	return c.Client.Write(ctx, key, f, value)
}

// openOwn opens the user's store in a child.
func openOwn(ctx context.Context, open OpenStore, s StoreSpec) (resource.Store, error) {
	if open == nil {
		return nil, fmt.Errorf("nothing opens the store %s in the processes of workers and resource: call scenarios.ChildWithStore in "+
			"TestMain or main, with the function in Runner.Store.Open", s.Store)
	}
	return open.open(ctx, s)
}

// resourceStore is what the resource serves.
func resourceStore(ctx context.Context, spec *childSpec, own OpenStore) (resource.Store, error) {
	if spec.Own == "" {
		return boltstore.Open(filepath.Join(spec.Dir, "resource.db"), nil)
	}
	s, err := openOwn(ctx, own, StoreSpec{Store: spec.Own, Dir: spec.Dir})
	if err == nil && spec.Fencing == history.FencingOff {
		if _, err = overwriter(spec.Own, s); err != nil {
			err = errors.Join(err, s.Close())
		}
	}
	return s, err
}

func resourceChild(spec *childSpec, l *line, own OpenStore) error {
	f := os.NewFile(listenFile, "listener")
	listener, err := net.FileListener(f) // on a duplicate
	if err := errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("scenarios: resource: %w", err)
	}
	store, err := resourceStore(context.Background(), spec, own)
	if err != nil {
		err = errors.Join(l.send(message{Error: err.Error(), Unsupported: errors.Is(err, errors.ErrUnsupported)}), listener.Close())
		_, _ = l.wait() // for the first sync: who is gone before it breaks the pipe, and what it has said isn't read
		return err
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
