package testbed

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"path"
	"strconv"
	"strings"
	"time"
)

// EtcdImage is the image that containers run unless FENCELAB_ETCD_IMAGE names another.
const EtcdImage = "quay.io/coreos/etcd:v3.6.16"

var etcdKind = kind{
	name: "etcd", title: "etcd", env: "ETCD",
	image: EtcdImage, ports: []int{2379, 2380}, data: "/var/lib/etcd",
	timeout:  time.Minute, // under a second is usual
	want:     "host:port (several: separated by commas)",
	url:      func(addr string) string { return "http://" + addr },
	programs: []string{"etcd", "etcdutl"}, module: "etcd",
	ready: func(ctx context.Context, addr string, _ int) (string, error) {
		var health struct{ Health, Reason string }
		if err := httpJSON(ctx, http.MethodGet, addr, "/health", &health); err != nil {
			return "", err
		}
		if health.Health != "true" { // a linearizable read, so it has a leader
			return "", fmt.Errorf("not healthy: %s", health.Reason)
		}
		var version struct{ EtcdServer string }
		if err := httpJSON(ctx, http.MethodGet, addr, "/version", &version); err != nil {
			return "", err
		}
		return version.EtcdServer, nil
	},
	leads: func(ctx context.Context, addr string) (bool, error) {
		var status struct {
			Header struct {
				Member string `json:"member_id"`
			}
			Leader string
		}
		err := httpJSON(ctx, http.MethodPost, addr, "/v3/maintenance/status", &status)
		return err == nil && status.Leader != "" && status.Leader == status.Header.Member, err
	},
}

// StartEtcd starts an etcd of n members, 1 or 3, and returns once each of them answers linearizable reads. A member
// whose disk is wiped comes back as what raft takes for one with a corrupted log; a real cluster is told to remove it and
// add a new one.
//
// Leases can be as short as 1 s: etcd raises a time to live below 1.5 election timeouts to that, rounded up to seconds.
// Nothing is synced to disk: what is killed here is the process, never the machine with its page cache.
func StartEtcd(ctx context.Context, n int, o *Options) (*Cluster, error) {
	if n != 1 && n != 3 {
		return nil, fmt.Errorf("testbed: %d members of an etcd; want 1 or 3", n)
	}
	names := make([]string, n)
	for i := range names {
		names[i] = fmt.Sprintf("etcd%d", i+1)
	}
	return start(ctx, &group{kind: &etcdKind, names: names, linked: n > 1, command: etcdCommand}, o)
}

const (
	etcdHeartbeat = 60 * time.Millisecond
	// etcdElection is the longest for which a lease of 1 s is one: etcd counts in heartbeats, floor(1.5 × 11) of them.
	etcdElection = 11 * etcdHeartbeat
	etcdQuota    = 64 << 20
)

func etcdCommand(_ context.Context, at place) (command, error) {
	url := func(host string, port int) string { return fmt.Sprintf("http://%s:%d", host, port) }
	me := at.me()
	args := []string{
		"/usr/local/bin/etcd",
		"--name", me.Name,
		"--data-dir", etcdData(at),
		"--listen-client-urls", url(at.Listen, me.Ports[0]),
		"--advertise-client-urls", url(me.Host, me.Ports[0]),
		"--listen-peer-urls", url(at.Listen, me.Ports[1]),
		"--heartbeat-interval", strconv.FormatInt(etcdHeartbeat.Milliseconds(), 10),
		"--election-timeout", strconv.FormatInt(etcdElection.Milliseconds(), 10),
		"--quota-backend-bytes", strconv.Itoa(etcdQuota),
		"--unsafe-no-fsync",
		"--log-level", "warn",
	}
	args = append(args, etcdMembers(at)...)
	return command{Args: append(args, at.More...)}, nil
}

// etcdMembers are the flags that say who the members are, to etcd and to etcdutl.
func etcdMembers(at place) []string {
	var members []string
	var own string
	for i, p := range at.Peers {
		url := fmt.Sprintf("http://%s:%d", p.Host, p.Ports[1])
		members = append(members, p.Name+"="+url)
		if i == at.Self {
			own = url
		}
	}
	return []string{"--initial-cluster", strings.Join(members, ","), "--initial-advertise-peer-urls", own}
}

// etcdData is the data directory that etcd makes: it wants one with permissions of its own.
func etcdData(at place) string { return path.Join(at.Dir, "etcd") }

// RestoreSnapshot replaces what a cluster of one etcd member holds by a snapshot of it, as its operator would after
// losing the disk: it kills the member, restores the snapshot with etcdutl and restarts it. So all that was written since
// the snapshot is lost, and revisions go back to it, unless bumpRevision is more than 0: then they go on from
// that of the snapshot plus bumpRevision, and watchers are told that what came before is compacted
// (etcdutl snapshot restore --bump-revision --mark-compacted).
func (c *Cluster) RestoreSnapshot(ctx context.Context, snapshot []byte, bumpRevision uint64) error {
	s := c.Servers[0]
	if s.kind != &etcdKind || len(c.Servers) != 1 {
		return fmt.Errorf("testbed: restore a snapshot: only of a single etcd member: %w", errors.ErrUnsupported)
	}
	if err := s.restore(ctx, snapshot, bumpRevision); err != nil {
		return fmt.Errorf("testbed: restore a snapshot: %w", err)
	}
	return nil
}

func (s *Server) restore(ctx context.Context, snapshot []byte, bumpRevision uint64) error {
	ctx, done, err := s.change(ctx, "restore")
	if err != nil {
		return err
	}
	defer done()
	s.running = false
	if err := s.host.kill(ctx); err != nil {
		return err
	}
	if err := s.host.wipe(ctx); err != nil {
		return err
	}
	at := s.place()
	file := path.Join(at.Dir, "snapshot.db")
	util := command{
		Args: append([]string{
			"/usr/local/bin/etcdutl", "snapshot", "restore", file, "--name", at.me().Name, "--data-dir", etcdData(at),
		}, etcdMembers(at)...),
		Files: map[string][]byte{file: snapshot},
	}
	if bumpRevision > 0 {
		util.Args = append(util.Args, "--bump-revision", strconv.FormatUint(bumpRevision, 10), "--mark-compacted")
	}
	if at.Provider == Local {
		if util.Path, err = s.kind.find("etcdutl"); err != nil {
			return err
		}
	}
	if err := s.host.once(ctx, util); err != nil {
		return fmt.Errorf("etcdutl: %w", err)
	}
	return s.begin(ctx)
}

// httpJSON asks the server at addr once, and decodes what it answers.
func httpJSON(ctx context.Context, method, addr, path string, answer any) error {
	// A transport that dials by itself goes on to do so when ctx has ended.
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	once := &http.Transport{
		DialContext:       func(context.Context, string, string) (net.Conn, error) { return conn, nil },
		DisableKeepAlives: true,
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://"+addr+path, strings.NewReader("{}"))
	if err != nil {
		return err
	}
	resp, err := (&http.Client{Transport: once}).Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	if err := json.NewDecoder(resp.Body).Decode(answer); err != nil {
		return fmt.Errorf("%s: %s: %w", path, resp.Status, err)
	}
	return nil
}
