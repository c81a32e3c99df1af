package zklock

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-zookeeper/zk"
)

// place is where an owner's nodes for a key are: children of parent named owner + ":" + the sequence number.
type place struct {
	parent, owner string
}

func (b *Backend) place(key, owner string) place {
	return place{b.root + "/" + escape(key), escape(owner)}
}

// escape makes any text a node's name: letters, digits and -_~%+ only, for ZooKeeper refuses some characters, and "." and
// ".." as names.
func escape(s string) string { return strings.ReplaceAll(url.QueryEscape(s), ".", "%2E") }

func (p place) prefix() string { return p.parent + "/" + p.owner + ":" }

// node is a place in the queue of a key.
type node struct {
	parent, name string
	owner        string
	seq          int32
	czxid        int64 // 0 if unknown
}

func (n node) path() string { return n.parent + "/" + n.name }

// list returns the queue of a key, first come first. What isn't a place in it is left out.
func (b *Backend) list(parent string) ([]node, error) {
	names, _, err := b.c.Children(parent)
	if errors.Is(err, zk.ErrNoNode) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	q := make([]node, 0, len(names))
	overflow := false
	for _, name := range names {
		i := strings.LastIndexByte(name, ':')
		if i < 0 {
			continue
		}
		seq, err := strconv.ParseInt(name[i+1:], 10, 32)
		if err != nil {
			continue
		}
		q = append(q, node{parent: parent, name: name, owner: name[:i], seq: int32(seq)})
		overflow = overflow || seq < 0 || seq == math.MaxInt32
	}
	if overflow {
		return b.byCzxid(q)
	}
	slices.SortFunc(q, func(m, n node) int { return cmp.Compare(m.seq, n.seq) })
	return q, nil
}

// byCzxid sorts nodes by the transactions that created them, which is what their sequence numbers stand for. It takes a
// question for each node, so it is for a parent that has outlived its 32-bit counter: it wraps around, and the server may
// then give one number several times. An idle parent vanishes, and its successor counts from 0.
func (b *Backend) byCzxid(q []node) ([]node, error) {
	live := q[:0]
	for _, n := range q {
		ok, stat, err := b.c.Exists(n.path())
		if err != nil {
			return nil, err
		}
		if ok {
			n.czxid = stat.Czxid
			live = append(live, n)
		}
	}
	slices.SortFunc(live, func(m, n node) int { return cmp.Compare(m.czxid, n.czxid) })
	return live, nil
}

// of returns the nodes of owner, in order.
func of(q []node, owner string) []node {
	return slices.DeleteFunc(slices.Clone(q), func(n node) bool { return n.owner != owner })
}

// held reports whether another owner than p's has the lock, and p's has no node.
func (b *Backend) held(p place) (bool, error) {
	others := func(q []node) bool { return len(q) > 0 && len(of(q, p.owner)) == 0 }
	q, err := b.list(p.parent)
	if err == nil && others(q) { // or had it a moment ago
		q, err = b.look(p.parent)
	}
	return others(q), err
}

// look is list, but shows what others have been told before look was called. Otherwise the client's server may lag behind
// theirs. A sync isn't enough: where the client's server is the leader, it does nothing. But writes are in order, and one
// that must fail is as good as any.
func (b *Backend) look(parent string) ([]node, error) {
	switch _, err := b.c.Set(parent, nil, math.MaxInt32); {
	case errors.Is(err, zk.ErrNoNode):
		return nil, nil
	case !errors.Is(err, zk.ErrBadVersion):
		return nil, err
	}
	return b.list(parent)
}

// sweep deletes all nodes of a place, and reports how many there were.
func (b *Backend) sweep(p place) (n int, err error) {
	q, err := b.look(p.parent)
	if err != nil {
		return 0, err
	}
	for _, m := range of(q, p.owner) {
		switch err := b.c.Delete(m.path(), -1); {
		case err == nil:
			n++
		case !errors.Is(err, zk.ErrNoNode):
			return n, err
		}
	}
	return n, nil
}

// join makes p's node, or finds the one that an earlier request of the same owner has made, whose answer may have been
// lost. It returns its lease, the queue, and whether the node is new.
func (b *Backend) join(p place, ttl time.Duration) (l *lease, q []node, fresh bool, err error) {
	made, err := b.create(p, ttl)
	if err != nil {
		return nil, nil, false, err
	}
	if l, err = b.adopt(p, made); err != nil {
		return nil, nil, false, err
	}
	// The queue that this client sees after its create has every node that was made before.
	if err = thrice(func() (err error) { q, err = b.list(p.parent); return err }); err != nil {
		b.remove(l)
		return nil, nil, false, err
	}
	mine := of(q, p.owner)
	if len(mine) == 0 {
		l.vanish()
		return nil, nil, false, errGone
	}
	if len(mine) == 1 {
		return l, q, true, nil
	}
	for _, n := range mine[1:] { // the first one is the acquisition; a create whose reply was lost has made it
		if err := b.c.Delete(n.path(), -1); err != nil && !errors.Is(err, zk.ErrNoNode) {
			return nil, nil, false, err
		}
	}
	if l.path != mine[0].path() {
		l.vanish()
	}
	l, err = b.adopt(p, mine[0].path())
	return l, q, false, err
}

// create makes a node at the end of p's queue, and its parent if need be. A create whose reply is lost is repeated; that
// the first may have been applied comes out in the queue.
func (b *Backend) create(p place, ttl time.Duration) (made string, err error) {
	for range 3 {
		err = thrice(func() (err error) {
			made, err = b.c.Create(p.prefix(), lifetime(ttl), zk.FlagEphemeral|zk.FlagSequence, b.acl)
			return err
		})
		if !errors.Is(err, zk.ErrNoNode) {
			return made, err
		}
		if err := b.createParent(p.parent); err != nil {
			return "", err
		}
	}
	return "", err
}

// createParent makes a key's parent a container: a node that the server deletes some time after its last child is gone. A
// server that has none (before 3.5) gets a plain node, which stays.
func (b *Backend) createParent(parent string) error {
	if !b.plain.Load() {
		err := b.createNode(parent, func(path string) error {
			_, err := b.c.CreateContainer(path, nil, zk.FlagContainer, b.acl)
			return err
		})
		if err == nil || err.Error() != errUnimplemented.Error() {
			return err
		}
		b.plain.Store(true) // such a server closes the connection too
	}
	return b.createNode(parent, b.createPlain)
}

// errUnimplemented is what the client makes of the code for an operation that the server doesn't know; it has no name for it.
var errUnimplemented = fmt.Errorf("unknown error: %v", zk.ErrCode(-6))

func (b *Backend) createPlain(path string) error {
	_, err := b.c.Create(path, nil, zk.FlagPersistent, b.acl)
	return err
}

// createNode has create make a node that stays, and plain ones above it if need be. That it is there already is as good.
func (b *Backend) createNode(path string, create func(path string) error) error {
	err := thrice(func() error { return create(path) })
	if errors.Is(err, zk.ErrNoNode) {
		if err := b.createNode(dir(path), b.createPlain); err != nil {
			return err
		}
		err = thrice(func() error { return create(path) })
	}
	if errors.Is(err, zk.ErrNodeExists) {
		return nil
	}
	return err
}

func dir(path string) string { return path[:strings.LastIndexByte(path, '/')] }

// lifetime is a node's data.
func lifetime(ttl time.Duration) []byte { return []byte(ttl.String()) }

// thrice repeats f while its connection breaks, as the client's own recipes do.
func thrice(f func() error) (err error) {
	for range 3 {
		if err = f(); !broken(err) || errors.Is(err, zk.ErrNoServer) { // no server: not sent, and none to send to
			return err
		}
	}
	return err
}

// broken reports whether err is the connection's, and no answer of the server's.
func broken(err error) bool {
	for _, e := range []error{zk.ErrConnectionClosed, zk.ErrNoServer, zk.ErrClosing, zk.ErrSessionExpired, zk.ErrSessionMoved} {
		if errors.Is(err, e) {
			return true
		}
	}
	_, ok := errors.AsType[net.Error](err) // a write failed
	return ok
}
