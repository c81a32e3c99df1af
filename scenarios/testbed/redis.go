package testbed

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
	"github.com/testcontainers/testcontainers-go"
)

// RedisImage is the image that containers run unless FENCELAB_REDIS_IMAGE names another.
const RedisImage = "redis:7.4.2-bookworm"

const (
	redisPort = "6379/tcp"
	// redisTimeout is how long a Redis may take from its start to its first answer; a few ms is usual.
	redisTimeout = 30 * time.Second
	// bindTries is how many ports a local Redis may find taken between their choice and its bind.
	bindTries = 10
)

// Options are the optional settings of [StartRedis].
type Options struct {
	Provider      Provider  // default: FENCELAB_TESTBED, else [Auto]
	AllowEmbedded bool      // let [Auto] take [Embedded] where nothing else can be had
	Args          []string  // further arguments for redis-server; containers and local only
	Progress      io.Writer // takes a line for what lasts or was decided; nil: none
}

// Redis is a running Redis server that holds nothing but what its users put there.
// An [External] one is the user's: it holds what it held, and Close leaves it alone.
type Redis struct {
	Addr     string   // host:port
	URL      string   // redis:// or, of an external server only, rediss://; with the credentials, if there are any
	Provider Provider // where it came from; never [Auto]
	Version  string   // as the server says; "miniredis" if embedded
	stop     func() error
}

// String is, for example, "redis 7.0.15 (containers)".
func (r *Redis) String() string {
	if r.Provider == Embedded {
		return fmt.Sprintf("%s (%s)", r.Version, r.Provider)
	}
	return fmt.Sprintf("redis %s (%s)", r.Version, r.Provider)
}

// Close ends the server and removes what it left; an external one it leaves alone. It may be called again.
func (r *Redis) Close() error { return r.stop() }

// StartRedis starts a Redis, or finds the external one, and returns once it answers. It keeps nothing on disk and
// allows DEBUG. An error says what to do about it. It matches [errors.ErrUnsupported] if the provider cannot start a
// server with o's Args.
//
// Until Close the process tears the server down when a signal ends it; see the package comment.
func StartRedis(ctx context.Context, o *Options) (*Redis, error) {
	if o == nil {
		o = &Options{}
	}
	p, err := ParseProvider(cmp.Or(string(o.Provider), os.Getenv(EnvProvider), string(Auto)))
	if err != nil {
		return nil, err
	}
	progress := o.Progress
	if progress == nil {
		progress = io.Discard
	}
	var r *Redis
	if p == Auto {
		r, err = startAnyRedis(ctx, o, progress)
	} else if r, err = startRedis(ctx, p, o, progress); err != nil {
		err = fmt.Errorf("%s: %w", p, err)
	}
	if err != nil {
		return nil, fmt.Errorf("testbed: no Redis: %w", err)
	}
	return r, nil
}

// startAnyRedis tries the providers that need nothing from the caller, best first.
func startAnyRedis(ctx context.Context, o *Options, progress io.Writer) (*Redis, error) {
	try := []Provider{Containers, Local}
	if o.AllowEmbedded {
		try = append(try, Embedded)
	}
	var failed []string
	for i, p := range try {
		r, err := startRedis(ctx, p, o, progress)
		if err == nil {
			return r, nil
		}
		if ctx.Err() != nil || errors.Is(err, errInterrupted) {
			return nil, fmt.Errorf("%s: %w", p, err)
		}
		failed = append(failed, fmt.Sprintf("%s: %v", p, err))
		if i+1 < len(try) {
			_, _ = fmt.Fprintf(progress, "testbed: no Redis from %s: %v; trying %s\n", p, err, try[i+1])
		}
	}
	return nil, fmt.Errorf("tried every way:\n  %s\n  external: set %s=external and %s=host:port to use a server of yours",
		strings.Join(failed, "\n  "), EnvProvider, EnvRedisAddr)
}

func startRedis(ctx context.Context, p Provider, o *Options, progress io.Writer) (*Redis, error) {
	r := &Redis{Provider: p}
	stop, err := servers.start(ctx, func(ctx context.Context) (func() error, error) {
		switch p {
		case Containers:
			return r.startContainer(ctx, o.Args, progress)
		case Local:
			return r.startLocal(ctx, o.Args)
		default:
			if len(o.Args) > 0 {
				return nil, fmt.Errorf("this server takes no arguments: %w", errors.ErrUnsupported)
			}
			if p == External {
				return r.findExternal(ctx)
			}
			return r.startEmbedded()
		}
	})
	if err != nil {
		return nil, err
	}
	r.stop = stop
	return r, nil
}

// redisArgs makes a redis-server volatile and controllable, under any configuration of its packager.
func redisArgs(more []string) []string {
	return append([]string{"--save", "", "--appendonly", "no", "--enable-debug-command", "yes"}, more...)
}

func (r *Redis) startContainer(ctx context.Context, args []string, progress io.Writer) (func() error, error) {
	image := cmp.Or(os.Getenv(EnvRedisImage), RedisImage)
	// The network of a container isn't loopback, which is all that the protected mode lets in.
	cmd := append([]string{"redis-server", "--protected-mode", "no"}, redisArgs(args)...)
	engine, err := dialEngine(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { _ = engine.Close() }()
	c, err := runContainer(ctx, engine, image, cmd, redisPort, progress)
	if err != nil {
		return nil, fmt.Errorf("%w\n    where no registry is reachable: sudo make images (make test and make demo then use "+
			"what it built), or set %s to an image you have and TESTCONTAINERS_RYUK_DISABLED=true", err, EnvRedisImage)
	}
	addr, info, err := awaitContainerRedis(ctx, c)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("the image %s: %w", image, err), removeContainer(c))
	}
	r.at(addr, info)
	return func() error { return removeContainer(c) }, nil
}

// awaitContainerRedis returns the address at which the Redis in c answers, and its INFO.
func awaitContainerRedis(ctx context.Context, c *testcontainers.DockerContainer) (string, map[string]string, error) {
	ctx, cancel := context.WithTimeout(ctx, redisTimeout)
	defer cancel()
	addrs, err := containerAddrs(ctx, c, redisPort)
	if err != nil {
		return "", nil, errors.Join(err, stillRuns(ctx, c))
	}
	type result struct {
		addr string
		info map[string]string
		err  error
	}
	results := make(chan result)
	for _, addr := range addrs {
		go func() {
			var info map[string]string
			err := poll(ctx, func(tryCtx context.Context) (err error) {
				if info, err = redisInfo(tryCtx, &redis.Options{Addr: addr}); err == nil {
					return nil
				}
				return cmp.Or(stillRuns(ctx, c), err)
			})
			results <- result{addr, info, err}
		}()
	}
	var first result
	for range addrs {
		r := <-results
		if r.err == nil && first.addr == "" {
			first = r
		}
		if _, ok := errors.AsType[permanent](r.err); ok || r.err == nil {
			cancel() // the other address won't do better
		}
		err = errors.Join(err, r.err)
	}
	if first.addr == "" {
		return "", nil, fmt.Errorf("does not answer: %w", err)
	}
	return first.addr, first.info, nil
}

// errBind is why a local Redis is started again, on another port.
var errBind = errors.New("the port was taken")

func (r *Redis) startLocal(ctx context.Context, args []string) (stop func() error, err error) {
	path := os.Getenv(EnvRedisServer)
	if path == "" {
		if path, err = exec.LookPath("redis-server"); err != nil {
			return nil, fmt.Errorf("there is no redis-server: sudo apt-get install redis-server (Debian, Ubuntu) or "+
				"brew install redis (macOS), or set %s to its path", EnvRedisServer)
		}
	} else if _, err := exec.LookPath(path); err != nil {
		return nil, fmt.Errorf("%s: %w", EnvRedisServer, err)
	}
	for range bindTries {
		stop, err = r.startLocalOnce(ctx, path, args)
		if !errors.Is(err, errBind) {
			break
		}
	}
	return stop, err
}

func (r *Redis) startLocalOnce(ctx context.Context, path string, args []string) (func() error, error) {
	ctx, cancel := context.WithTimeout(ctx, redisTimeout)
	defer cancel()
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	// argv[0] decides what the binary is: redis-server may be a link to one that does several things.
	c, err := spawn(path, "redis-server", func(dir string) []string {
		return append([]string{"--bind", "127.0.0.1", "--port", strconv.Itoa(port), "--dir", dir}, redisArgs(args)...)
	})
	if err != nil {
		return nil, err
	}
	addr := net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	var info map[string]string
	err = poll(ctx, func(ctx context.Context) (err error) {
		select {
		case <-c.Exited():
			err := fmt.Errorf("%s ended (%w): %s", path, c.Wait(), c.log())
			if strings.Contains(c.log(), "Address already in use") {
				err = fmt.Errorf("%w: %w", errBind, err)
			}
			return permanent{err}
		default:
		}
		if info, err = redisInfo(ctx, &redis.Options{Addr: addr}); err != nil {
			return err
		}
		if pid := info["process_id"]; pid != strconv.Itoa(c.PID) {
			return fmt.Errorf("%s is another server's, of process %s", addr, pid) // ours is about to fail to bind
		}
		return nil
	})
	if err != nil {
		return nil, errors.Join(err, c.stop())
	}
	r.at(addr, info)
	return c.stop, nil
}

func (r *Redis) findExternal(ctx context.Context) (func() error, error) {
	addr := os.Getenv(EnvRedisAddr)
	if addr == "" {
		return nil, fmt.Errorf("%s is not set: set it to the host:port or redis:// URL of your server", EnvRedisAddr)
	}
	url := addr
	if !strings.Contains(addr, "://") {
		url = "redis://" + addr
	}
	opt, err := redis.ParseURL(url)
	if err != nil || opt.Network != "tcp" {
		// The error may quote the URL, and with it a password.
		return nil, fmt.Errorf("%s is neither host:port nor a redis:// or rediss:// URL", EnvRedisAddr)
	}
	ctx, cancel := context.WithTimeout(ctx, redisTimeout)
	defer cancel()
	info, err := redisInfo(ctx, opt)
	if err != nil {
		return nil, fmt.Errorf("the server at %s (%s) does not answer: %w", opt.Addr, EnvRedisAddr, err)
	}
	r.at(opt.Addr, info)
	r.URL = url
	return func() error { return nil }, nil
}

func (r *Redis) startEmbedded() (func() error, error) {
	m := miniredis.NewMiniRedis()
	m.ClockTTL(true) // keys expire as time passes, not as a test says
	if err := m.StartAddr("127.0.0.1:0"); err != nil {
		return nil, err
	}
	r.at(m.Addr(), map[string]string{"redis_version": "miniredis"})
	return func() error { m.Close(); return nil }, nil
}

func (r *Redis) at(addr string, info map[string]string) {
	r.Addr, r.URL, r.Version = addr, "redis://"+addr, info["redis_version"]
}

// redisInfo asks a server who it is: INFO server. It tries once.
func redisInfo(ctx context.Context, opt *redis.Options) (map[string]string, error) {
	// The client prints a line for every server that it can't reach, so see first whether somebody listens.
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", opt.Addr)
	if err != nil {
		return nil, err
	}
	if err := conn.Close(); err != nil {
		return nil, err
	}
	once := *opt
	once.ContextTimeoutEnabled, once.DisableIdentity = true, true
	once.MaxRetries, once.DialerRetries, once.PoolSize = -1, 1, 1
	once.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	c := redis.NewClient(&once)
	defer func() { _ = c.Close() }()
	text, err := c.Info(ctx, "server").Result()
	if err != nil {
		return nil, err
	}
	info := make(map[string]string)
	for sc := bufio.NewScanner(strings.NewReader(text)); sc.Scan(); {
		if name, value, ok := strings.Cut(sc.Text(), ":"); ok {
			info[name] = value
		}
	}
	if info["redis_version"] == "" {
		return nil, errors.New("INFO server names no redis_version")
	}
	return info, nil
}
