package testbed

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/mount"
	"github.com/moby/moby/api/types/network"
	"github.com/moby/moby/client"
	"github.com/testcontainers/testcontainers-go"

	"github.com/fencelab/fencelab/faults"
)

// containers are the hosts of a group of containers, and the network between them.
type containers struct {
	group   *group
	engine  *testcontainers.DockerProvider
	near    bool   // the engine runs on this machine
	network string // id; empty: none
	all     []*box
}

// box is the host of one container. Its data directory is a volume, so that a container can be replaced by another
// one with other arguments.
type box struct {
	*containers
	name      string
	hostPort  int
	release   func() error // of hostPort
	volume    string
	networks  map[string]string // id of a network to the server's name there
	container *testcontainers.DockerContainer
	command   command // that container runs
	progress  io.Writer
}

// newContainers connects to the engine, chooses ports and, if the servers are linked, makes their network.
func newContainers(ctx context.Context, g *group, progress io.Writer) (_ hosts, err error) {
	engine, err := dialEngine(ctx)
	if err != nil {
		return nil, g.missing(err)
	}
	c := &containers{group: g, engine: engine}
	defer func() {
		if err != nil {
			for _, b := range c.all {
				err = errors.Join(err, b.remove(ctx))
			}
			err = errors.Join(err, c.remove(ctx))
		}
	}()
	if err := sweepContainers(ctx, engine); err != nil {
		return nil, err
	}
	at, err := engine.DaemonHost(ctx)
	if err != nil {
		return nil, fmt.Errorf("find the Docker engine's host: %w", err)
	}
	c.near = at == "localhost"
	for _, name := range g.names {
		b := &box{containers: c, name: name, volume: newName(), networks: make(map[string]string), progress: progress}
		if b.hostPort, b.release, err = reservePort(); err != nil {
			return nil, err
		}
		c.all = append(c.all, b)
	}
	if g.linked {
		return c, c.link(ctx)
	}
	return c, nil
}

// link makes a network on which the servers, and those that the group joins, know each other by name. It leads nowhere
// else, so that clients come another way, on which they still come when a server is cut from its peers.
func (c *containers) link(ctx context.Context) error {
	labels, err := labels()
	if err != nil {
		return err
	}
	// A creation isn't cut short, or a network might come to be whose id nobody learns.
	createCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), engineTimeout)
	defer cancel()
	made, err := c.engine.Client().NetworkCreate(createCtx, newName(), client.NetworkCreateOptions{
		Driver: "bridge", Internal: true, Labels: labels,
	})
	if err != nil {
		return fmt.Errorf("make a network: %w", err)
	}
	c.network = made.ID
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	for _, b := range c.all {
		b.networks[c.network] = b.name
	}
	for _, s := range c.group.join {
		ctx, done, err := s.change(ctx, "connect")
		if err != nil {
			return err
		}
		err = s.host.(*box).connect(ctx, c.network, s.Name)
		done()
		if err != nil {
			return err
		}
	}
	return nil
}

func (c *containers) host(i int) host { return c.all[i] }

func (c *containers) place(i int) place {
	at := place{Provider: Containers, Dir: c.group.data, Listen: "0.0.0.0", Self: i}
	for _, b := range c.all {
		at.Peers = append(at.Peers, peer{Name: b.name, Host: b.name, Ports: c.group.ports})
	}
	for _, s := range c.group.join {
		at.Joined = append(at.Joined, peer{Name: s.Name, Host: s.Name, Ports: s.kind.ports})
	}
	return at
}

// remove removes the network. The group's containers are gone; those it joined leave it.
func (c *containers) remove(ctx context.Context) error {
	defer func() { _ = c.engine.Close() }()
	if c.network == "" {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), engineTimeout)
	defer cancel()
	for _, s := range c.group.join {
		s.mu.Lock()
		err := s.host.(*box).disconnect(ctx, c.network)
		s.mu.Unlock()
		if err != nil {
			return err
		}
	}
	if _, err := c.engine.Client().NetworkRemove(ctx, c.network, client.NetworkRemoveOptions{}); err != nil && !cerrdefs.IsNotFound(err) {
		return fmt.Errorf("testbed: remove it by hand: docker network rm %s: %w", c.network, err)
	}
	return nil
}

func (b *box) connect(ctx context.Context, id, name string) error {
	b.networks[id] = name
	if b.container == nil {
		return nil
	}
	_, err := b.engine.Client().NetworkConnect(ctx, id, client.NetworkConnectOptions{
		Container: b.container.GetContainerID(), EndpointConfig: &network.EndpointSettings{Aliases: []string{name}},
	})
	if err != nil {
		return fmt.Errorf("connect %s to the network of its peers: %w", b.name, err)
	}
	return nil
}

func (b *box) disconnect(ctx context.Context, id string) error {
	if b.container == nil {
		delete(b.networks, id)
		return nil
	}
	_, err := b.engine.Client().NetworkDisconnect(ctx, id, client.NetworkDisconnectOptions{
		Container: b.container.GetContainerID(), Force: true,
	})
	if err != nil && !cerrdefs.IsNotFound(err) {
		return fmt.Errorf("disconnect %s from the network of its peers: %w", b.name, err)
	}
	delete(b.networks, id)
	return nil
}

func (b *box) clientPort() string { return fmt.Sprintf("%d/tcp", b.group.ports[0]) }

func (b *box) pid() int { return 0 }

// start starts the container again, if it is to run the same command, or else another one with the same data.
func (b *box) start(ctx context.Context, c command) error {
	same := slices.Equal(c.Args, b.command.Args) && slices.Equal(c.Env, b.command.Env)
	if b.container != nil && same {
		_, err := b.engine.Client().ContainerStart(ctx, b.container.GetContainerID(), client.ContainerStartOptions{})
		if err != nil {
			return fmt.Errorf("start the container: %w", err)
		}
		return nil
	}
	if err := b.removeContainer(ctx); err != nil {
		return err
	}
	image := cmp.Or(os.Getenv(b.group.envImage()), b.group.image)
	if err := b.run(ctx, image, c); err != nil {
		if strings.Contains(err.Error(), "address already in use") || strings.Contains(err.Error(), "port is already allocated") {
			return fmt.Errorf("%w: %w", errBind, err)
		}
		if _, inspectErr := b.engine.Client().ImageInspect(ctx, image); !cerrdefs.IsNotFound(inspectErr) {
			return err
		}
		err = fmt.Errorf("%w\n    where no registry is reachable: sudo make images (make test and make demo then use "+
			"what it built), or set %s to an image you have and TESTCONTAINERS_RYUK_DISABLED=true", err, b.group.envImage())
		return &MissingError{b.group.title + " image", "sudo make images", err}
	}
	b.command = c
	return nil
}

// once runs a command in a container of its own, with the server's data directory.
func (b *box) once(ctx context.Context, c command) error {
	if err := b.start(ctx, c); err != nil {
		return err
	}
	wait := b.engine.Client().ContainerWait(ctx, b.container.GetContainerID(), client.ContainerWaitOptions{})
	select {
	case r := <-wait.Result:
		if r.StatusCode != 0 {
			return b.ended(ctx)
		}
	case err := <-wait.Error:
		return fmt.Errorf("wait for the container's end: %w", err)
	}
	return b.removeContainer(ctx)
}

// run runs image with a command and publishes the port for clients. It returns once the container has started, which
// says nothing of the server in it.
func (b *box) run(ctx context.Context, image string, c command) error {
	labels, err := labels()
	if err != nil {
		return err
	}
	if _, err := b.engine.Client().ImageInspect(ctx, image); cerrdefs.IsNotFound(err) {
		_, _ = fmt.Fprintf(b.progress, "testbed: pulling the image %s\n", image)
	}

	// A pull can be cut short. The creation can't, or a container might come to be whose id nobody learns.
	pullCtx, stopPull := context.WithTimeout(ctx, pullTimeout)
	defer stopPull()
	runCtx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(nil)
	pullOver := context.AfterFunc(pullCtx, func() { cancel(context.Cause(pullCtx)) })
	defer pullOver()
	create := func(context.Context, testcontainers.ContainerRequest) error {
		if !pullOver() {
			return context.Cause(pullCtx)
		}
		time.AfterFunc(createTimeout, func() { cancel(context.DeadlineExceeded) })
		return nil
	}
	connect := func(ctx context.Context, made testcontainers.Container) error {
		b.container = made.(*testcontainers.DockerContainer)
		for id, name := range b.networks {
			if err := b.connect(ctx, id, name); err != nil {
				return err
			}
		}
		return nil
	}

	binding := network.PortBinding{HostPort: strconv.Itoa(b.hostPort)}
	if b.near { // else the engine is elsewhere, and its loopback interface out of reach
		binding.HostIP = netip.MustParseAddr(loopback)
	}
	env := make(map[string]string)
	for _, e := range c.Env {
		name, value, _ := strings.Cut(e, "=")
		env[name] = value
	}
	var files []testcontainers.ContainerFile
	for path, data := range c.Files {
		files = append(files, testcontainers.ContainerFile{Reader: bytes.NewReader(data), ContainerFilePath: path, FileMode: 0o600})
	}
	made, err := testcontainers.Run(runCtx, image,
		testcontainers.WithCmd(c.Args...),
		testcontainers.WithEnv(env),
		testcontainers.WithFiles(files...),
		testcontainers.WithExposedPorts(b.clientPort()),
		testcontainers.WithLabels(labels),
		testcontainers.WithHostConfigModifier(func(hc *container.HostConfig) {
			hc.PortBindings = network.PortMap{network.MustParsePort(b.clientPort()): {binding}}
			hc.Mounts = append(hc.Mounts, mount.Mount{
				Type: mount.TypeVolume, Source: b.volume, Target: b.group.data,
				VolumeOptions: &mount.VolumeOptions{Labels: labels},
			})
			for _, file := range c.mounts {
				hc.Mounts = append(hc.Mounts, mount.Mount{Type: mount.TypeBind, Source: file, Target: file, ReadOnly: true})
			}
		}),
		testcontainers.WithAdditionalLifecycleHooks(testcontainers.ContainerLifecycleHooks{
			PreCreates:  []testcontainers.ContainerRequestHook{create},
			PostCreates: []testcontainers.ContainerHook{connect},
		}),
	)
	if made != nil {
		b.container = made
	}
	if err != nil {
		err = fmt.Errorf("run the image %s: %w", image, err)
		if cause := context.Cause(runCtx); cause != nil {
			err = fmt.Errorf("%w: %w", cause, err)
		}
		return errors.Join(err, b.removeContainer(ctx))
	}
	return nil
}

// kill returns when the container has stopped. The engine unpauses it for that.
func (b *box) kill(ctx context.Context) error {
	if b.container == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, engineTimeout)
	defer cancel()
	id := b.container.GetContainerID()
	wait := b.engine.Client().ContainerWait(ctx, id, client.ContainerWaitOptions{Condition: container.WaitConditionNotRunning})
	_, err := b.engine.Client().ContainerKill(ctx, id, client.ContainerKillOptions{Signal: "SIGKILL"})
	if err != nil && !cerrdefs.IsConflict(err) && !cerrdefs.IsNotFound(err) { // it isn't running
		return fmt.Errorf("kill the container: %w", err)
	}
	select {
	case err := <-wait.Error:
		if !cerrdefs.IsNotFound(err) {
			return fmt.Errorf("wait for the container's end: %w", err)
		}
	case <-wait.Result:
	}
	return nil
}

func (b *box) pause(ctx context.Context) (faults.Heal, error) {
	id := b.container.GetContainerID()
	if _, err := b.engine.Client().ContainerPause(ctx, id, client.ContainerPauseOptions{}); err != nil {
		return nil, err
	}
	return func(ctx context.Context) error {
		_, err := b.engine.Client().ContainerUnpause(ctx, id, client.ContainerUnpauseOptions{})
		return err
	}, nil
}

// wipe removes the container and its volume.
func (b *box) wipe(ctx context.Context) error {
	if err := b.removeContainer(ctx); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), engineTimeout)
	defer cancel()
	_, err := b.engine.Client().VolumeRemove(ctx, b.volume, client.VolumeRemoveOptions{Force: true})
	if err != nil && !cerrdefs.IsNotFound(err) {
		return fmt.Errorf("testbed: remove it by hand: docker volume rm %s: %w", b.volume, err)
	}
	return nil
}

func (b *box) remove(ctx context.Context) error { return errors.Join(b.wipe(ctx), b.release()) }

// removeContainer kills and removes the container, and may be called again.
func (b *box) removeContainer(ctx context.Context) error {
	if b.container == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), engineTimeout)
	defer cancel()
	id := b.container.GetContainerID()
	_, err := b.engine.Client().ContainerRemove(ctx, id, client.ContainerRemoveOptions{Force: true, RemoveVolumes: true})
	if err != nil && !cerrdefs.IsNotFound(err) {
		return fmt.Errorf("testbed: remove it by hand: docker rm -f %s: %w", id, err)
	}
	b.container = nil
	return nil
}

// addrs returns the addresses at which the port may be reached. There are two, because testcontainers takes its own
// container's gateway for the engine's host wherever it runs in a container, which is wrong where the engine runs in
// that container too.
func (b *box) addrs(ctx context.Context) ([]string, error) {
	host, err := b.container.Host(ctx)
	if err != nil {
		return nil, err
	}
	port := strconv.Itoa(b.hostPort)
	addrs := []string{net.JoinHostPort(host, port)}
	if host != "localhost" {
		addrs = append(addrs, net.JoinHostPort(loopback, port))
	}
	return addrs, nil
}

// ended returns a [permanent] error with the end of the container's log if it has exited.
func (b *box) ended(ctx context.Context) error {
	state, err := b.container.State(ctx)
	if err != nil || state.Running {
		return err
	}
	err = fmt.Errorf("container exited with status %d", state.ExitCode)
	if logs, logErr := b.container.Logs(ctx); logErr == nil {
		text, _ := io.ReadAll(logs)
		_ = logs.Close()
		err = fmt.Errorf("%w: %s", err, tail(text))
	}
	return permanent{err}
}
