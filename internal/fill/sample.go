package fill

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/redis/go-redis/v9"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// Pings tells how long a server took for the cheapest of its requests since the sample before, on a connection of their own.
type Pings struct {
	Count   int           `json:"pings"`       // about 100 a second, fewer if they took longer
	PingP50 time.Duration `json:"ping_p50_ns"` // the median
	PingMax time.Duration `json:"ping_max_ns"` // the longest
}

// RedisSample is what a Redis says of itself at one moment. Fields are named in JSON as in INFO, but for the keys and the
// PINGs.
type RedisSample struct {
	UsedMemory       uint64  `json:"used_memory"`             // bytes that it has allocated
	UsedMemoryRSS    uint64  `json:"used_memory_rss"`         // bytes that the system has given it
	Fragmentation    float64 `json:"mem_fragmentation_ratio"` // the latter by the former
	Keys             uint64  `json:"keys"`                    // expired ones that are not yet deleted included
	Expires          uint64  `json:"expires"`                 // those of them that have a TTL
	ExpiredKeys      uint64  `json:"expired_keys"`            // deleted since it started because they had expired
	ExpiredStalePerc float64 `json:"expired_stale_perc"`      // its guess of how much of Expires has expired, in %
	Pings
}

// String is for a line of progress.
func (s RedisSample) String() string {
	return fmt.Sprintf("used %sB, RSS %sB (%.2f)  %s keys, %s with a TTL  expired %s (stale %.0f %%)  ping %v, max %v",
		Short(float64(s.UsedMemory)), Short(float64(s.UsedMemoryRSS)), s.Fragmentation,
		Short(float64(s.Keys)), Short(float64(s.Expires)), Short(float64(s.ExpiredKeys)), s.ExpiredStalePerc,
		s.PingP50.Round(time.Microsecond), s.PingMax.Round(time.Microsecond))
}

// EtcdSample is what an etcd member says of itself at one moment, in its /metrics. A ping is a linearizable read.
type EtcdSample struct {
	Revision      uint64 `json:"revision"`       // grows by one with each write
	Keys          uint64 `json:"keys"`           // that exist
	DBSize        uint64 `json:"db_size"`        // bytes of the database's file
	DBSizeInUse   uint64 `json:"db_size_in_use"` // bytes of it that hold something, history included
	RSS           uint64 `json:"rss"`            // bytes that the system has given the process
	LeasesGranted uint64 `json:"leases_granted"` // since it started
	LeasesRevoked uint64 `json:"leases_revoked"` // since it started, expired ones included
	Proposals     uint64 `json:"proposals"`      // entries of the Raft log that are committed
	Syncs         uint64 `json:"wal_fsyncs"`     // since it started
	Pings
}

// String is for a line of progress.
func (s EtcdSample) String() string {
	return fmt.Sprintf("revision %s  %s keys, %s leases  db %sB, %sB in use, RSS %sB  read %v, max %v",
		Short(float64(s.Revision)), Short(float64(s.Keys)), Short(float64(s.LeasesGranted-s.LeasesRevoked)),
		Short(float64(s.DBSize)), Short(float64(s.DBSizeInUse)), Short(float64(s.RSS)),
		s.PingP50.Round(time.Microsecond), s.PingMax.Round(time.Microsecond))
}

// pingEvery is the time between pings.
const pingEvery = 10 * time.Millisecond

// pinger sends pings until it is closed, or its context ends.
type pinger struct {
	stop context.CancelFunc
	done chan struct{}

	mu   sync.Mutex
	took []time.Duration
	err  error
}

func newPinger(ctx context.Context, ping func(context.Context) error) *pinger {
	ctx, stop := context.WithCancel(ctx)
	p := &pinger{stop: stop, done: make(chan struct{})}
	go func() {
		defer close(p.done)
		tick := time.NewTicker(pingEvery)
		defer tick.Stop()
		for {
			began := time.Now()
			err := ping(ctx)
			took := time.Since(began)
			if ctx.Err() != nil {
				return
			}
			p.mu.Lock()
			p.took = append(p.took, took)
			if err != nil {
				p.err = fmt.Errorf("fill: ping: %w", err)
			}
			p.mu.Unlock()
			select {
			case <-tick.C:
			case <-ctx.Done():
				return
			}
		}
	}()
	return p
}

// Close ends the pings.
func (p *pinger) Close() {
	p.stop()
	<-p.done
}

// take returns how long pings took since the last call, and the error of one that failed.
func (p *pinger) take() (Pings, error) {
	p.mu.Lock()
	took, err := p.took, p.err
	p.took = nil
	p.mu.Unlock()
	n := len(took)
	if n == 0 {
		return Pings{}, err
	}
	slices.Sort(took)
	return Pings{n, took[n/2], took[n-1]}, err
}

// RedisSampler watches a Redis: it pings until Close, and tells on request. The client stays the caller's to close.
type RedisSampler struct {
	*pinger
	client *redis.Client
}

// NewRedisSampler starts to watch.
func NewRedisSampler(ctx context.Context, client *redis.Client) *RedisSampler {
	return &RedisSampler{newPinger(ctx, func(ctx context.Context) error { return client.Ping(ctx).Err() }), client}
}

// Sample asks the server.
func (s *RedisSampler) Sample(ctx context.Context) (RedisSample, error) {
	out, err := AskRedis(ctx, s.client)
	if err != nil {
		return RedisSample{}, err
	}
	out.Pings, err = s.take()
	return out, err
}

// AskRedis is a sample without pings.
func AskRedis(ctx context.Context, client *redis.Client) (RedisSample, error) {
	text, err := client.Info(ctx).Result()
	if err != nil {
		return RedisSample{}, fmt.Errorf("fill: INFO: %w", err)
	}
	return parseInfo(text)
}

// parseInfo reads INFO's answer. The databases are summed up; a field that is missing is an error, for 0 would be an answer.
func parseInfo(info string) (RedisSample, error) {
	fields := map[string]string{}
	var s RedisSample
	var errs []error
	number := func(name, text string) uint64 {
		v, err := strconv.ParseUint(text, 10, 64)
		if err != nil {
			errs = append(errs, fmt.Errorf("fill: INFO says %s:%s, which is no number", name, text))
		}
		return v
	}
	decimal := func(name string) float64 {
		v, err := strconv.ParseFloat(fields[name], 64)
		if err != nil {
			errs = append(errs, fmt.Errorf("fill: INFO says %s:%s, which is no number", name, fields[name]))
		}
		return v
	}
	for line := range strings.Lines(info) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		fields[name] = value
		if db, ok := strings.CutPrefix(name, "db"); ok && strings.HasPrefix(value, "keys=") && db != "" {
			for part := range strings.SplitSeq(value, ",") {
				what, count, _ := strings.Cut(part, "=")
				switch what {
				case "keys":
					s.Keys += number(name, count)
				case "expires":
					s.Expires += number(name, count)
				}
			}
		}
	}
	count := func(name string) uint64 { return number(name, fields[name]) }
	s.UsedMemory, s.UsedMemoryRSS = count("used_memory"), count("used_memory_rss")
	s.Fragmentation = decimal("mem_fragmentation_ratio")
	s.ExpiredKeys, s.ExpiredStalePerc = count("expired_keys"), decimal("expired_stale_perc")
	return s, errors.Join(errs...)
}

// EtcdSampler watches a member of an etcd: it pings until Close, and tells on request. The client stays the caller's to
// close.
type EtcdSampler struct {
	*pinger
	url  string
	http *http.Client
}

// NewEtcdSampler starts to watch the member at addr, host:port or a URL, through which client works.
func NewEtcdSampler(ctx context.Context, client *clientv3.Client, addr string) *EtcdSampler {
	if !strings.Contains(addr, "://") {
		addr = "http://" + addr
	}
	ping := func(ctx context.Context) error {
		_, err := client.Get(ctx, "ping", clientv3.WithCountOnly())
		return err
	}
	return &EtcdSampler{newPinger(ctx, ping), strings.TrimSuffix(addr, "/") + "/metrics", &http.Client{Transport: &http.Transport{}}}
}

// Sample asks the member.
func (s *EtcdSampler) Sample(ctx context.Context) (EtcdSample, error) {
	out, err := s.Ask(ctx)
	if err != nil {
		return EtcdSample{}, err
	}
	out.Pings, err = s.take()
	return out, err
}

// Ask is a sample without pings.
func (s *EtcdSampler) Ask(ctx context.Context) (EtcdSample, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url, nil)
	if err != nil {
		return EtcdSample{}, fmt.Errorf("fill: %w", err)
	}
	resp, err := s.http.Do(req)
	if err != nil {
		return EtcdSample{}, fmt.Errorf("fill: %w", err)
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		return EtcdSample{}, fmt.Errorf("fill: GET %s: %s", s.url, resp.Status)
	}
	return parseMetrics(resp.Body)
}

// Close ends the pings.
func (s *EtcdSampler) Close() {
	s.pinger.Close()
	s.http.CloseIdleConnections()
}

// parseMetrics reads what etcd's /metrics says. A metric that is missing is an error, for 0 would be an answer.
func parseMetrics(r io.Reader) (EtcdSample, error) {
	parser := expfmt.NewTextParser(model.UTF8Validation)
	all, err := parser.TextToMetricFamilies(r)
	if err != nil {
		return EtcdSample{}, fmt.Errorf("fill: /metrics of etcd: %w", err)
	}
	var errs []error
	get := func(name string) uint64 {
		f := all[name]
		if f == nil || len(f.GetMetric()) == 0 {
			errs = append(errs, fmt.Errorf("fill: /metrics of etcd has no %s", name))
			return 0
		}
		m := f.GetMetric()[0]
		return uint64(m.GetGauge().GetValue()+m.GetCounter().GetValue()) + m.GetHistogram().GetSampleCount()
	}
	s := EtcdSample{
		Revision: get("etcd_debugging_mvcc_current_revision"), Keys: get("etcd_debugging_mvcc_keys_total"),
		DBSize: get("etcd_mvcc_db_total_size_in_bytes"), DBSizeInUse: get("etcd_mvcc_db_total_size_in_use_in_bytes"),
		RSS:           get("process_resident_memory_bytes"),
		LeasesGranted: get("etcd_debugging_lease_granted_total"), LeasesRevoked: get("etcd_debugging_lease_revoked_total"),
		Proposals: get("etcd_server_proposals_committed_total"), Syncs: get("etcd_disk_wal_fsync_duration_seconds"),
	}
	return s, errors.Join(errs...)
}
