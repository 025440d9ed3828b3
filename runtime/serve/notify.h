/* Messages to the service manager that started the server: systemd's Type=notify, sd_notify(3). */
#ifndef MM_RUNTIME_SERVE_NOTIFY_H
#define MM_RUNTIME_SERVE_NOTIFY_H

/* Sends lines such as "READY=1" to the socket that $NOTIFY_SOCKET names. Does nothing where it names none; a manager that cannot be
 * reached is no reason to stop serving. */
void mm_notify(const char *lines);

#endif
